"""Penalties, biases, masks and log-probabilities in TensorRT engines, on stand-ins for TensorRT and CUDA."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e import tensorrt_engines
from tests.e2e.conformance import CASES, LIMITS, MODES, TIGHT, build
from tests.e2e.tiny import Case, Run, assert_all_blocks_free, run_together, with_constraints
from tests.tensorrt_stand_in import CudaRuntime, TensorRT
from trtspec import LLM, SamplingParams, StructuredOutputs
from trtspec.backends.table import COMPILERS
from trtspec.backends.tensorrt.profiles import MAX_BANS, MAX_BIASES
from trtspec.errors import RequestError

models = tensorrt_engines.models
cuda = tensorrt_engines.cuda
kernels = tensorrt_engines.kernels
trt = tensorrt_engines.trt
built = tensorrt_engines.built
engine = tensorrt_engines.engine

REGEX = "(bg|gb|g){9,}"
MASKED = [
    Case([i + 1, 2, 3], SamplingParams(temperature=i / 2, seed=i, max_tokens=20, structured_outputs=guide))
    for i, guide in enumerate([StructuredOutputs(regex=REGEX)] * 4)
]
CONSTRAINED = [*with_constraints(CASES)[:56], *MASKED]


@pytest.fixture(scope="module")
def wanted(models: Path) -> Run:
    return run_together(LLM(models / "target", num_kv_blocks=128, **LIMITS).engine, CONSTRAINED)


def logprobs_of(run: Run) -> list[dict[int, float]]:
    """Return the log-probabilities of all positions of all requests that asked for them."""
    records = [one.logprobs for one in run.requests if one.logprobs is not None]
    return [{token: one.logprob for token, one in entry.items()} for record in records for entry in record.entries]


@pytest.mark.parametrize(
    "mode", [mode if mode == "eagle3" else pytest.param(mode, marks=pytest.mark.long) for mode in MODES]
)
def test_batches_with_constraints(engine: Callable[..., Path], cuda: CudaRuntime, wanted: Run, mode: str) -> None:
    """Packed in a tight cache, ids and logprobs of 60 mixed requests are eager's. CUDA graphs run them."""
    llm = LLM(engine(mode), **TIGHT)
    run = run_together(llm.engine, CONSTRAINED)
    assert run.outcomes == wanted.outcomes
    got, expected = logprobs_of(run), logprobs_of(wanted)
    assert len(got) > 200
    assert [list(one) for one in got] == [list(one) for one in expected]
    assert all(one == pytest.approx(other, abs=1e-4) for one, other in zip(got, expected, strict=True))
    assert llm.engine.stats.preemptions
    assert_all_blocks_free(llm)
    if mode != "none":
        assert all(0 < share < 1 for share in run.speculation.acceptance_per_position)


def test_a_growing_history_keeps_its_graph(engine: Callable[..., Path], cuda: CudaRuntime) -> None:
    """Histories have as many columns as a power of two, so nearly all steps of a generation run as graphs."""
    llm = LLM(engine("none"), **TIGHT)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=80, ignore_eos=True)
    llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert cuda.launched_graphs > 60


def test_logits_are_copied_only_for_those_who_ask(
    engine: Callable[..., Path], cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(engine("none"), **TIGHT)
    copied: list[int] = []
    copy = cuda.cudaMemcpyAsync

    def counted(dst: int, src: int, count: int, kind: int, stream: int) -> tuple[int]:
        if kind == cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost:
            copied.append(count)
        return copy(dst, src, count, kind, stream)

    monkeypatch.setattr(cuda, "cudaMemcpyAsync", counted)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    row = 4 * llm.engine.model.vocab_size
    assert copied
    assert row not in copied
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, logprobs=1), use_tqdm=False)
    assert copied.count(row) >= 4


def test_more_than_a_plan_takes_is_refused(engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The request alone is refused, before it is queued."""
    llm = LLM(engine("none"), **TIGHT)
    vocab_size = MAX_BIASES + 1
    monkeypatch.setattr(llm.engine, "model", replace(llm.engine.model, vocab_size=vocab_size))
    params = SamplingParams(logit_bias=dict.fromkeys(range(vocab_size), 1.0))
    with pytest.raises(RequestError, match=f"logit_bias names {vocab_size} tokens, and backend tensorrt takes 1024"):
        llm.generate([[1, 2]], params, use_tqdm=False)
    params = SamplingParams(stop_token_ids=list(range(100, 100 + MAX_BANS)), min_tokens=1)
    with pytest.raises(RequestError, match=r"holds back 65 ids .* backend tensorrt takes 64; give fewer"):
        llm.generate([[1, 2]], params, use_tqdm=False)
    assert not llm.engine.has_work


# -- an engine folder that was built without constraints ---------------------------------------------------------------


@pytest.fixture
def without(trt: TensorRT, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An engine folder without constraints, whose generation_config.json has a penalty, such as Qwen2.5's."""
    monkeypatch.setitem(COMPILERS, "tensorrt", replace(COMPILERS["tensorrt"], constraints=False))
    opinionated = shutil.copytree(models, tmp_path / "models")
    file = opinionated / "target" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "repetition_penalty": 1.5}))
    return build(opinionated, tmp_path / "engine", "tensorrt", "none", "float32")


def test_constraints_on_logits_are_refused_by_name(without: Path) -> None:
    """Plans have no inputs for constraints on logits, so the error names the constraints."""
    llm = LLM(without, generation_config="off", **TIGHT)
    params = SamplingParams(repetition_penalty=1.2, logit_bias={3: 1.0}, logprobs=2)
    asked = r"repetition_penalty = 1\.2, logit_bias = \(\(3, 1\.0\),\), logprobs = 2"
    with pytest.raises(RequestError, match=rf"{asked}: this engine on backend tensorrt .*build the engine again"):
        llm.generate([[1, 2]], params, use_tqdm=False)
    # The refusal comes before a grammar is compiled, so its error is not found, and its package may be missing.
    with pytest.raises(RequestError, match=r"structured_outputs = .*: this engine on backend tensorrt"):
        llm.generate([[1, 2]], SamplingParams(structured_outputs=StructuredOutputs(regex="(")), use_tqdm=False)


def test_a_penalty_that_nobody_asked_for_is_dropped_with_a_warning(
    without: Path, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    [want] = LLM(models / "target", num_kv_blocks=128, **LIMITS).generate([[1, 2]], params, use_tqdm=False)
    llm = LLM(without, **TIGHT)
    for _ in range(2):
        [got] = llm.generate([[1, 2]], params, use_tqdm=False)
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
    [warning] = caplog.messages
    assert "generation_config.json says repetition_penalty = 1.5, and this engine on backend tensorrt" in warning
    caplog.clear()
    LLM(without, generation_config="off", **TIGHT)
    assert not caplog.records
