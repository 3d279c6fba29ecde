"""EAGLE inside the target's graph: speculation changes no output, and each draft is made of the right draft KV."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.head_cases import ROOMY, TIGHT, Make, Reference, assert_right, chunks_of, inside, maker, refer
from tests.e2e.tiny import draw_cases
from tests.head_checkpoints import make_eagle

DTYPES = ("float32", "bfloat16")
CASES = draw_cases(30, seed=27, most_prompt=60)


@pytest.fixture(scope="module")
def make(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(K, fields of the speculation, engine options) -> LLM with an EAGLE head; made by head_cases.maker."""
    head = make_eagle(tmp_path_factory.mktemp("eagle"), target)
    return maker(target, {"method": "eagle", "model": str(head)})


@pytest.fixture(scope="module")
def reference(target: Path, make: Make) -> Callable[[str], Reference]:
    """dtype -> the reference of CASES, computed when first asked for."""
    return functools.cache(lambda dtype: refer(target, lambda: inside(make, dtype=dtype), CASES, dtype=dtype))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_every_draft_length(make: Make, reference: Callable[[str], Reference], k: int) -> None:
    """Every draft length works in a cache too small for all, with prompts in chunks.

    Drafts are right and wrong at every position, and requests end inside a draft.
    """
    dtype = DTYPES[k % 2]
    with make(k, dtype=dtype, max_batch_size=min(8, 32 // (k + 1)), **TIGHT) as llm:
        run = assert_right(llm, reference(dtype), told=True)
        acceptance = run.speculation.acceptance_per_position
        assert len(acceptance) == k
        assert all(0 < share < 1 for share in acceptance), acceptance
        assert llm.engine.stats.preemptions > 0
        assert run.num_mixed_steps > 0
        assert run.cut_inside_draft()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_heads_own_drafts(make: Make, reference: Callable[[str], Reference], dtype: str) -> None:
    """The head's own drafts, sampled with the target's noise, are right now and then in so small a vocabulary."""
    with make(3, dtype=dtype, max_batch_size=8, **TIGHT) as llm:
        run = assert_right(llm, reference(dtype), told=False)
        assert 0 < run.speculation.acceptance_per_position[0] < 1


@pytest.mark.parametrize("rows", [7])
def test_chunks_of_prompts(make: Make, reference: Callable[[str], Reference], rows: int) -> None:
    """Prompts in chunks change no draft. The token after a chunk is the prompt's."""
    with make(3, max_batch_size=8, **ROOMY) as llm:
        most = chunks_of(llm, rows)
        run = assert_right(llm, reference("float32"), told=True)
        assert most() == rows
        assert run.num_mixed_steps > 0
