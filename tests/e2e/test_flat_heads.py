"""Medusa heads and MLP speculators inside the target's graph: speculation changes no output.

Each draft is made of the right hidden state. These heads have no KV of their own, so they need no cache and do not
change prefix reuse.

As in test_eagle3, outputs equal plain decoding of each request alone, bit for bit. Drafts equal those of an engine that
prefills each prompt at once and never uses a draft.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.head_cases import Made, Place, chunks_of, first_wrong_draft, log_plainly, run_watched, step_of, watch
from tests.e2e.tiny import Case, Outcome, Run, assert_all_blocks_free, draw_cases, run_alone, run_together
from tests.head_checkpoints import make_medusa, make_mlp_speculator
from trtspec import LLM, SamplingParams
from trtspec.backends.tensorrt.profiles import TensorRTOptions
from trtspec.build.build import build_engine
from trtspec.build.plan import plan_build
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig

METHODS = ("medusa", "mlp_speculator")
K = 3
MOST_K = 5
DRAFT_IDS = (0, 9, 4, 12, 1, 2, 14, 5, 6, 11, 8)  # ids of Medusa's drafts: 11 of the target's 16
CASES = draw_cases(24, seed=41, most_prompt=60)
ROOMY: dict[str, Any] = {"num_kv_blocks": 1000, "block_size": 4}
PLAIN: dict[str, Any] = {**ROOMY, "max_batch_size": 64, "enable_prefix_caching": False}
TIGHT: dict[str, Any] = {"max_num_tokens": 32, "num_kv_blocks": 25, "block_size": 4}

Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def folders(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        "medusa": make_medusa(folder, target, num_heads=MOST_K, token_map=DRAFT_IDS),
        "mlp_speculator": make_mlp_speculator(folder, target, n_predict=MOST_K, inner_dim=24, scale_input=True),
    }


@pytest.fixture(scope="module")
def make(target: Path, folders: dict[str, Path]) -> Make:
    """(method, K, dtype, fields of the speculation, engine options) -> LLM."""

    def make(
        method: str, k: int = K, dtype: str = "float32", fields: dict[str, Any] | None = None, **options: Any
    ) -> LLM:
        speculation = {"method": method, "model": str(folders[method]), "num_speculative_tokens": k, **(fields or {})}
        return LLM(target, speculation, dtype=dtype, **options)

    return make


def plain(target: Path, cases: list[Case], dtype: str = "float32") -> tuple[list[Outcome], list[list[int]]]:
    """Run each case alone without speculation. Returns their outcomes, and each prompt with its output."""
    with LLM(target, dtype=dtype, enable_prefix_caching=False, **ROOMY) as llm:
        outcomes = run_alone(llm.engine, cases)
    return outcomes, [case.prompt + outcome.token_ids for case, outcome in zip(cases, outcomes, strict=True)]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right outcomes of CASES, and the hidden states and drafts of a head that knows the answers and lies."""

    outcomes: list[Outcome]
    answers: list[list[int]]
    told: dict[Place, Made]


@pytest.fixture(scope="module")
def reference(target: Path, make: Make) -> Callable[[str, str], Reference]:
    """(method, dtype) -> reference, computed when first asked for."""
    decoded = functools.cache(lambda dtype: plain(target, CASES, dtype))

    def compute(method: str, dtype: str) -> Reference:
        outcomes, answers = decoded(dtype)
        with make(method, MOST_K, dtype, **PLAIN) as llm:
            return Reference(outcomes, answers, log_plainly(llm, watch(llm, answers), CASES))

    return functools.cache(compute)


def assert_lossless(llm: LLM, expected: Reference) -> Run:
    """Check all cases, run together: outputs, the hidden states of drafts, and that all blocks are free in the end."""
    head = watch(llm, expected.answers)
    run, seen = run_watched(llm, CASES)
    assert run.outcomes == expected.outcomes
    assert first_wrong_draft(head, seen, expected.told) is None
    assert not seen.incomplete
    assert llm.engine.stats.stale_drafts == 0
    assert_all_blocks_free(llm)
    return run


@pytest.mark.parametrize(
    ("method", "k", "dtype"),
    [
        *(("medusa", k, dtype) for k, dtype in ((1, "float32"), (4, "bfloat16"))),
        *(("mlp_speculator", k, dtype) for k, dtype in ((2, "bfloat16"), (5, "float32"))),
    ],
)
def test_every_draft_length(
    make: Make, reference: Callable[[str, str], Reference], method: str, k: int, dtype: str
) -> None:
    """Every draft length works in a cache too small for all, with prompts in chunks.

    Drafts are right and wrong at every position, and requests end inside a draft.
    """
    with make(method, k, dtype, max_batch_size=min(8, 32 // (k + 1)), **TIGHT) as llm:
        run = assert_lossless(llm, reference(method, dtype))
        acceptance = run.speculation.acceptance_per_position
        assert len(acceptance) == k
        assert all(0 < share < 1 for share in acceptance), acceptance
        assert llm.engine.stats.preemptions > 0
        assert run.num_mixed_steps > 0
        assert run.cut_inside_draft()


@pytest.mark.parametrize("fields", [{}, {"draft_sample_method": "greedy"}], ids=["drawn", "greedy"])
@pytest.mark.parametrize("method", METHODS)
def test_the_heads_own_drafts(
    make: Make, reference: Callable[[str, str], Reference], method: str, fields: dict[str, Any]
) -> None:
    """The heads' own drafts are right now and then in so small a vocabulary."""
    with make(method, fields=fields, max_batch_size=8, **TIGHT) as llm:
        run = run_together(llm.engine, CASES)
        assert run.outcomes == reference(method, "float32").outcomes
        assert 0 < run.speculation.acceptance_per_position[0] < 1
        assert_all_blocks_free(llm)


@pytest.mark.parametrize(("method", "rows"), [("medusa", 5), ("mlp_speculator", 1)])
def test_chunks_of_prompts(make: Make, reference: Callable[[str, str], Reference], method: str, rows: int) -> None:
    """Prompts in chunks change no draft. The token after the last row of a chunk is the prompt's."""
    with make(method, max_batch_size=8, **ROOMY) as llm:
        most = chunks_of(llm, rows)
        assert_lossless(llm, reference(method, "float32"))
        assert most() == rows


@pytest.mark.parametrize("method", METHODS)
def test_draft_lengths_that_change(make: Make, reference: Callable[[str, str], Reference], method: str) -> None:
    """If every step has another K, and some have none, no hidden state is missing afterwards."""
    with make(method, 4, max_batch_size=6, **TIGHT) as llm:
        engine, proposer = llm.engine, llm.engine.loop.proposer
        proposer.draft_len = lambda scheduler: (4, 0, 2, 1)[engine.stats.steps % 4]  # type: ignore[method-assign]
        run = assert_lossless(llm, reference(method, "float32"))
        assert {emission.draft_len for step in run.steps for emission in step} >= {0, 1, 2, 4}


@pytest.mark.parametrize("method", METHODS)
def test_prefixes_are_shared_as_without_speculation(target: Path, make: Make, method: str) -> None:
    """Prefixes are shared as without speculation.

    No draft KV depends on the next token, so the last shared block need not be computed again.
    """
    base = [1 + i * i % 14 for i in range(42)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    cases = [Case(base, params), *(Case([*base[: 4 * n], 15, 15 - n, *base[:5]], params) for n in range(0, 11, 2))]
    outcomes, answers = plain(target, cases)
    with make(method, **PLAIN) as llm:
        expected = log_plainly(llm, watch(llm, answers), cases)
    with make(method, **ROOMY) as llm:
        head = watch(llm, answers)
        for i, case in enumerate(cases):  # one after the other
            run, seen = run_watched(llm, [case])
            assert run.outcomes == outcomes[i : i + 1]
            assert first_wrong_draft(head, seen, expected) is None
        assert llm.engine.stats.prefix_hit_tokens == sum(4 * n for n in range(0, 11, 2))
        assert_all_blocks_free(llm)


# -- engines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "backend"), [*((method, "aoti") for method in METHODS), ("medusa", "tensorrt")])
def test_what_would_be_built(
    target: Path, folders: dict[str, Path], make: Make, tmp_path: Path, method: str, backend: str
) -> None:
    """An engine is planned from config.json alone.

    The heads need no cache, so TensorRT's own attention works at any K.
    """
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(folders[method] / "config.json", bare / "config.json")
    speculation = SpeculativeConfig(method=method, model=str(bare), num_speculative_tokens=K)
    options = TensorRTOptions(attention="native") if backend == "tensorrt" else None
    plan = plan_build(target, speculation, EngineConfig(backend=backend, max_batch_size=2), options=options)
    made = plan.executables["target"]
    with LLM(target, dtype="float32") as llm, make(method) as speculating:
        ours, theirs = step_of(speculating), llm.engine.loop.target.inner.step
        assert tuple(ours.kv_layers) == tuple(theirs.kv_layers)
        assert [*made.kv.layers] == [(layer.num_heads, layer.head_dim) for layer in ours.kv_layers]
    assert (plan.mode, plan.draft_len) == (method.upper(), K)
    assert plan.missing == (f"draft model: no model.safetensors (or model.safetensors.index.json) in {bare}",)
    tensors = load_file(folders[method] / "model.safetensors")
    floats = [tensor for name, tensor in tensors.items() if name != "token_map" and not re.search(r"\.[34]\.", name)]
    assert made.weights["head"] >= sum(tensor.nbytes for tensor in floats)  # K of the heads; panels are padded


@pytest.mark.long
def test_an_engine_of_heads(
    target: Path, folders: dict[str, Path], reference: Callable[[str, str], Reference], tmp_path: Path
) -> None:
    """A compiled engine has its heads in its folder, and decodes as the eager target does."""
    speculation = SpeculativeConfig(model=str(folders["mlp_speculator"]), num_speculative_tokens=2)
    config = EngineConfig(max_batch_size=8, block_size=4, max_num_tokens=32)
    engine = build_engine(target, tmp_path / "engine", speculation, config)
    assert (engine.path / "draft" / "config.json").is_file()
    with LLM(engine.path, num_kv_blocks=25) as llm:
        run = run_together(llm.engine, CASES)
        assert run.outcomes == reference("mlp_speculator", "float32").outcomes
        assert run.speculation.acceptance_per_position[0] > 0
        assert_all_blocks_free(llm)
