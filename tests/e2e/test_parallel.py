"""Drafts of one pass over mask tokens: speculation changes no output, and each draft is made of the right draft KV."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.head_cases import MOST_K, PLAIN, ROOMY, TIGHT, Make, Reference, assert_right, chunks_of, maker, refer
from tests.e2e.recorded import assert_graph_is_step, record
from tests.e2e.tiny import MASK, Case, draw_cases, perturbed
from tests.head_checkpoints import make_dflash, make_eagle3
from trtspec import SamplingParams
from trtspec.methods.step import OneEngineStep

MODES = ("PARD", "P_EAGLE", "DFLASH")
CASES = draw_cases(16, seed=27, most_prompt=60)
BASE = [1 + i * i % 14 for i in range(42)]


@pytest.fixture(scope="module")
def makers(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Make]:
    """mode -> a function that makes an LLM; head_cases.maker explains its arguments."""
    folder = tmp_path_factory.mktemp("parallel")
    drafts = {
        "PARD": ("draft_model", perturbed(target, noise=0.15, folder=folder, pard_token=MASK)),
        "P_EAGLE": ("eagle3", make_eagle3(folder, target, (0, 1), mask=MASK, num_layers=3)),
        "DFLASH": ("dflash", make_dflash(folder, target, (0, 1), MASK)),
    }
    return {
        mode: maker(target, {"method": method, "model": str(path), "parallel_drafting": True})
        for mode, (method, path) in drafts.items()
    }


def enough(mode: str, k: int) -> int:
    """Number of drafts that the reference must make for its first k to be those of K = k.

    In DFlash, masks see each other, so the drafts depend on their number.
    """
    return k if mode == "DFLASH" else MOST_K


Refer = Callable[[str, str, int], Reference]
"""(mode, dtype, K) -> reference of CASES."""


@pytest.fixture(scope="module")
def reference(target: Path, makers: dict[str, Make]) -> Refer:
    """(mode, dtype, K) -> reference of CASES, computed when first asked for."""

    @functools.cache
    def compute(mode: str, dtype: str, k: int) -> Reference:
        return refer(target, lambda: makers[mode](k, **PLAIN, dtype=dtype), CASES, dtype=dtype)

    return lambda mode, dtype, k: compute(mode, dtype, enough(mode, k))


@pytest.mark.parametrize(
    ("k", "dtype"), [(1, "float32"), (3, "bfloat16"), pytest.param(5, "float32", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("mode", MODES)
def test_drafts_right_and_wrong_at_every_place(
    makers: dict[str, Make], reference: Refer, mode: str, k: int, dtype: str
) -> None:
    """Drafts are right and wrong at every position, in a cache too small for all, with prompts in chunks.

    Requests end inside a draft.
    """
    with makers[mode](k, dtype=dtype, max_batch_size=min(8, 32 // (k + 1)), **TIGHT) as llm:
        assert llm.engine.loop.input_builder.mode.name == mode
        run = assert_right(llm, reference(mode, dtype, k), told=True)
        acceptance = run.speculation.acceptance_per_position
        assert len(acceptance) == k
        assert all(0 < share < 1 for share in acceptance), acceptance
        assert llm.engine.stats.preemptions > 0
        assert run.num_mixed_steps > 0
        assert run.cut_inside_draft()


@pytest.mark.parametrize("mode", MODES)
def test_its_own_drafts(makers: dict[str, Make], reference: Refer, mode: str) -> None:
    """A draft model's own drafts, sampled with the target's noise, are right now and then in so small a vocabulary."""
    with makers[mode](3, dtype="float32", max_batch_size=8, **TIGHT) as llm:
        run = assert_right(llm, reference(mode, "float32", 3), told=False)
        assert 0 < run.speculation.acceptance_per_position[0] < 1


@pytest.mark.parametrize("rows", [1, 4, pytest.param(17, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", MODES)
def test_chunks_of_prompts(makers: dict[str, Make], reference: Refer, mode: str, rows: int) -> None:
    """Prompts in chunks change no draft. Masks after a chunk are at the positions of the next chunk's tokens."""
    with makers[mode](3, dtype="float32", max_batch_size=8, **ROOMY) as llm:
        most = chunks_of(llm, rows)
        assert_right(llm, reference(mode, "float32", 3).first(8), told=rows == 4)
        assert most() == rows


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("mode", MODES)
def test_other_block_sizes(makers: dict[str, Make], reference: Refer, mode: str, size: int) -> None:
    """With blocks of one token, and too few of them, a request has exactly the rows that it reserved."""
    limits = {**TIGHT, "block_size": size, "num_kv_blocks": 1 + 96 // size}
    with makers[mode](MOST_K, dtype="float32", max_batch_size=5, **limits) as llm:
        assert_right(llm, reference(mode, "float32", MOST_K), told=True)
        assert llm.engine.stats.preemptions > 0


@pytest.mark.parametrize("mode", MODES)
def test_steps_with_other_draft_lengths(makers: dict[str, Make], reference: Refer, mode: str) -> None:
    """Drafts are right if every step has another K. In a step with K = 0, tokens are read all the same."""
    with makers[mode](4, dtype="float32", max_batch_size=6, **TIGHT) as llm:
        engine, proposer = llm.engine, llm.engine.loop.proposer
        lengths = (4, 0, 0, 4, 0) if mode == "DFLASH" else (4, 0, 0, 2, 1)
        proposer.draft_len = lambda scheduler: lengths[engine.stats.steps % 5]  # type: ignore[method-assign]
        assert_right(llm, reference(mode, "float32", 4), told=True)


@pytest.mark.parametrize("mode", MODES)
def test_shared_prefixes(target: Path, makers: dict[str, Make], mode: str) -> None:
    """Requests reuse each other's blocks of tokens, and never blocks of masks."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    cases = [Case(BASE, params), *(Case([*BASE[: 4 * n], 15, 15 - n, *BASE[:9]], params) for n in range(2, 11, 2))]
    cases += [Case(BASE[:n], params) for n in (21, 22, 23, 24, 41)]
    expected = refer(target, lambda: makers[mode](enough(mode, 3), **PLAIN), cases)
    with makers[mode](3, max_batch_size=3, **ROOMY) as llm:
        chunks_of(llm, 3)
        assert_right(llm, expected, told=True)
        assert llm.engine.stats.prefix_hit_tokens > 100


@pytest.mark.parametrize("mode", MODES)
def test_arg_max_drafts(target: Path, makers: dict[str, Make], mode: str) -> None:
    cases = [Case(case.prompt, dataclasses.replace(case.params, min_tokens=0)) for case in CASES[:10]]
    fields = {"draft_sample_method": "greedy"}
    expected = refer(target, lambda: makers[mode](enough(mode, 3), fields, **PLAIN), cases)
    with makers[mode](3, fields, max_batch_size=8, **TIGHT) as llm:
        assert_right(llm, expected, told=False)


@pytest.mark.parametrize(
    ("mode", "uniform", "functional"),
    [
        ("PARD", True, False),
        pytest.param("DFLASH", True, False, marks=pytest.mark.long),
        pytest.param("DFLASH", False, False, marks=pytest.mark.long),
        pytest.param("PARD", False, True, marks=pytest.mark.long),
        pytest.param("P_EAGLE", False, False, marks=pytest.mark.long),
    ],
)
def test_the_graph_is_the_step(makers: dict[str, Make], mode: str, uniform: bool, functional: bool) -> None:
    recorder = record(lambda **limits: makers[mode](3, **limits), "sampled")
    step = recorder.inner.step
    assert isinstance(step, OneEngineStep)
    assert_graph_is_step(OneEngineStep(step.decoder, step.worker, functional), recorder, uniform, functional)
