"""TensorRT engines on stand-ins for TensorRT and CUDA (tests/tensorrt_stand_in.py): built, loaded and run.

They run the conformance suite's requests, as any backend does. So networks, bindings, profiles, buffers and CUDA graphs
are right for every batch that the engine makes, as far as TensorRT does what it documents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e import tensorrt_engines
from tests.e2e.conformance import CASES, LIMITS, MODES, TIGHT, K, packed
from tests.e2e.tensorrt_engines import Built
from tests.e2e.tiny import Case, Outcome, Run, assert_all_blocks_free, run_together, with_constraints
from tests.fake_tensorrt.golden import assert_golden
from tests.tensorrt_stand_in import Context, CudaRuntime, TensorRT
from trtspec import LLM, SamplingParams, StructuredOutputs
from trtspec.backends.export import example_batch
from trtspec.backends.tensorrt import executable as tensorrt
from trtspec.backends.tensorrt.profiles import MAX_BANS, MAX_BIASES
from trtspec.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    EngineError,
    RequestError,
)

KERNELS = {"SpecAttention-fp32-d8-g2", "ProcessLogitsConstrained", "SpecSample"}
BUILT = [pytest.param(mode, marks=pytest.mark.long) if mode in ("ngram", "draft") else mode for mode in MODES]
MODE_KERNELS = {
    "draft": {*KERNELS, "ProcessLogits"},  # the draft's logits have no constraints
    "eagle3": {*KERNELS, "ProcessLogits", "SpecSampleVocab", "SpecAccept"},
}
REGEX = "(bg|gb|g){9,}"
MASKED = [
    Case([i + 1, 2, 3], SamplingParams(temperature=i / 2, seed=i, max_tokens=20, structured_outputs=guide))
    for i, guide in enumerate([StructuredOutputs(regex=REGEX)] * 4)
]
CONSTRAINED = [*with_constraints(CASES)[:56], *MASKED]


models = tensorrt_engines.models
cuda = tensorrt_engines.cuda
kernels = tensorrt_engines.kernels
trt = tensorrt_engines.trt
built = tensorrt_engines.built
engine = tensorrt_engines.engine
plain = tensorrt_engines.plain


@pytest.mark.parametrize("mode", BUILT)
def test_what_is_asked_for_is_what_is_written_down(
    engine: Callable[..., Path], built: dict[tuple[str, bool], Built], mode: str
) -> None:
    """Networks, profiles and flags are those of the golden files."""
    engine(mode)
    one = built[mode, False]
    for role, plan in zip(("target", "draft"), one.plans.values(), strict=False):
        assert_golden(f"{mode}, {role}", f"tensorrt_{mode}_{role}.txt", *plan)
    assert len(one.plans) == 1 + (mode == "draft")
    assert one.kernels == MODE_KERNELS.get(mode, KERNELS)


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [
        *((mode, False) for mode in ("none", "eagle3")),
        *(pytest.param(mode, False, marks=pytest.mark.long) for mode in ("ngram", "draft")),
        *(pytest.param(mode, True, marks=pytest.mark.long) for mode in ("eagle3", "eagle3_two_engine")),
    ],
)
def test_batches_of_every_kind(
    engine: Callable[..., Path], cuda: CudaRuntime, plain: list[Outcome], mode: str, schedule: bool
) -> None:
    """Packed in a tight cache, outcomes are eager's of each request alone. All device memory is freed."""
    folder = engine(mode, schedule)
    before = len(cuda.blocks)
    run = packed(LLM(folder, **TIGHT))
    assert run.outcomes == plain
    assert cuda.launched_graphs > 0
    del run
    import gc

    gc.collect()
    assert len(cuda.blocks) == before


# -- penalties, biases, masks and log-probabilities -----------------------------------------------------------------


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


# -- graphs, buffers and profiles --------------------------------------------------------------------------------------


def executable(folder: Path) -> Any:
    return LLM(folder, **TIGHT).engine.loop.target.inner


def test_steps_take_turns_with_two_sets_of_buffers(engine: Callable[..., Path]) -> None:
    found = executable(engine("eagle3"))
    plan = found._graphs[0].run.__self__
    assert plan.sets[0].keys() == plan.sets[1].keys()
    assert not {m.address for m in plan.sets[0].values()} & {m.address for m in plan.sets[1].values()}
    bound = []
    launch = plan._launch
    plan._launch = lambda *of: bound.append((context := launch(*of)).addresses["input_ids"]) or context
    for _ in range(6):
        found.run(example_batch(K, LIMITS["block_size"], uniform=True))
    assert bound == [plan.sets[i]["input_ids"].address for i in (0, 1, 0, 1, 0, 1)]


def test_generations_have_a_profile_of_their_own(engine: Callable[..., Path]) -> None:
    found = executable(engine("eagle3"))
    plan = found._graphs[0].run.__self__
    found.run(example_batch(K, LIMITS["block_size"], uniform=True))
    assert [context.ran for context in plan.contexts] == [False, True]
    graph, tensors = found._checked(example_batch(K, LIMITS["block_size"]))
    shapes = [(32,) if name == "input_ids" else tuple(x.shape) for name, x in zip(graph.names, tensors, strict=True)]
    assert plan._profile(shapes) == tensorrt.GENERATION  # 32 rows are 8 requests' worth
    plan.largest[tensorrt.GENERATION]["input_ids"] = (1,)
    assert plan._profile(shapes) == tensorrt.MIXED
    found.run(example_batch(K, LIMITS["block_size"]))
    assert plan.contexts[tensorrt.MIXED].ran
    assert {profile for profile, *_ in plan.seen} == {tensorrt.GENERATION}  # others are never captured


def test_what_a_plan_was_not_built_for_is_named(engine: Callable[..., Path]) -> None:
    found = executable(engine("eagle3"))
    inputs = example_batch(K, LIMITS["block_size"])
    most = found._graphs[0].run.__self__.largest[tensorrt.MIXED]["block_tables"][1]
    tables = torch.ones(4, most + 8, dtype=torch.int32)
    tables[:, : inputs.attn.block_tables.shape[1]] = inputs.attn.block_tables
    message = (
        rf"block_tables has the shape \[4, {most + 8}\], 8 more along axis 1 than .* \[8, {most}\]; .*--max_seq_len"
    )
    with pytest.raises(EngineError, match=message):
        found.run(replace(inputs, attn=replace(inputs.attn, block_tables=tables)))


def test_a_plan_that_cannot_be_captured_runs_without(
    engine: Callable[..., Path], cuda: CudaRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.capture_fails = True
    found = executable(engine("eagle3"))
    for _ in range(6):
        found.run(example_batch(K, LIMITS["block_size"], uniform=True))
    assert cuda.launched_graphs == 0
    assert [record.getMessage() for record in caplog.records if "without CUDA graphs" in record.getMessage()]


def test_a_lost_device_ends_all_requests(engine: Callable[..., Path], cuda: CudaRuntime) -> None:
    """None of them is launched again alone, as nothing runs any more."""
    llm = LLM(engine("none"), **TIGHT)
    cuda.lost = True
    with pytest.raises(EngineError, match=r"DeviceError: .* error 700; the GPU failed"):
        llm.generate([[1, 2], [3]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert isinstance(llm.failure, DeviceError)


def test_a_step_that_tensorrt_does_not_run_may_mean_a_lost_device(
    engine: Callable[..., Path], cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = executable(engine("none"))
    monkeypatch.setattr(Context, "execute_async_v3", lambda self, stream: False)
    with pytest.raises(EngineError, match="did not run the step, its messages say why"):
        found.run(example_batch(0, LIMITS["block_size"]))
    cuda.lost = True
    with pytest.raises(DeviceError, match="the GPU failed"):
        found.run(example_batch(0, LIMITS["block_size"]))


def test_plans_of_another_version_or_card_are_refused(
    engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = engine("none")
    made_for = json.loads((folder / "config.json").read_text())["executables"]["target"]["made_for"]
    assert made_for == {"tensorrt": "11.4.0.106", "gpu": "Stand-in", "compute_capability": "9.0"}
    monkeypatch.setattr(TensorRT, "__version__", "11.5.0.1")
    with pytest.raises(
        CheckpointError, match=r"built for tensorrt 11\.4\.0\.106, this is 11\.5\.0\.1; rebuild it here"
    ):
        LLM(folder, **TIGHT)
    monkeypatch.setattr(TensorRT, "__version__", "11.4.0.106")
    monkeypatch.setattr(
        CudaRuntime, "cudaGetDeviceProperties", lambda *_: (0, SimpleNamespace(name=b"Other", major=8, minor=0))
    )
    with pytest.raises(CheckpointError, match="built for gpu Stand-in, this is Other"):
        LLM(folder, **TIGHT)


def test_a_plan_that_tensorrt_cannot_read_is_named(engine: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(engine("none"), tmp_path / "engine")
    plan = folder / "target" / "rank0.engine"
    plan.write_bytes(b"X" * plan.stat().st_size)
    with pytest.raises(CheckpointError, match=r"TensorRT 11.4.0.106 cannot read .*rank0\.engine"):
        LLM(folder, **TIGHT)


def test_the_cache_is_as_large_as_the_plan_says(engine: Callable[..., Path]) -> None:
    folder = engine("none")
    for option in ({}, TIGHT, {"kv_cache_memory": 2**30}):
        assert LLM(folder, **option).engine.loop.scheduler.allocator.num_blocks == 41
    for option in ({"num_kv_blocks": 42}, {"kv_cache_memory": 30_000}):
        with pytest.raises(ConfigError, match=r"num_kv_blocks = 41, which take \d+ bytes; \d+ were asked for: rebuild"):
            LLM(folder, **option)
