"""DSpark drafts, cut where the draft's confidence is low: other drafts are verified, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.modes import LIMITS, ROOMY, TIGHT, cases
from tests.dspark_checkpoints import make_dspark
from tests.e2e.tiny import MASK, Outcome, Run, add_tokenizer, make_target, run_alone, run_together
from trtspec import LLM
from trtspec.errors import ConfigError

K = 4
CASES = cases()[:32]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_target(tmp_path_factory.mktemp("dspark"), num_hidden_layers=3)
    add_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def plain(target: Path) -> list[Outcome]:
    with LLM(target, **LIMITS, **ROOMY) as llm:
        return run_alone(llm.engine, CASES)


def run(target: Path, draft: Path, **fields: Any) -> Run:
    speculation = {"method": "dspark", "model": str(draft), "num_speculative_tokens": K, **fields}
    with LLM(target, speculation, **LIMITS, **TIGHT) as llm:
        found = run_together(llm.engine, CASES)
        assert llm.engine.stats.preemptions > 0
        assert llm.engine.stats.drafter_failures == 0
    return found


def offered(found: Run) -> list[int]:
    """Number of drafts of each request in each of its steps."""
    return [emission.draft_len for step in found.steps for emission in step]


DRAFTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated, fill-in": {"markov": "gated", "from_anchor": False},
    "rnn, fill-in": {"markov": "rnn", "from_anchor": False},
    "rnn, DeepSpec's layout": {"markov": "rnn", "deepspec": True},
    "no Markov head": {"rank": 0},
    "reduced vocabulary": {"target_ids": (0, 9, 4, 12, 1, 2, 14, 5, 6, 11, 8, 3, 7)},
    "confidence of the block alone": {"confidence_reads_markov": False},
}
SOME = ("vanilla", "gated, fill-in", "reduced vocabulary")


@pytest.mark.parametrize("threshold", [0.4, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.long) for name in DRAFTS]
)
def test_no_token_changes(
    tmp_path: Path, target: Path, plain: list[Outcome], name: str, threshold: float | None
) -> None:
    """No draft changes a token, in a cache too small for all, with prompts in chunks.

    Confidences of random weights lie on both sides of the threshold.
    """
    found = run(
        target, make_dspark(tmp_path, target, (0, 2), MASK, **DRAFTS[name]), draft_confidence_threshold=threshold
    )
    assert found.outcomes == plain
    right = found.speculation.acceptance_per_position
    assert all(0 < share < 1 for share in right[: None if threshold is None else 2])  # few are offered after those
    if threshold is not None:
        assert {*offered(found)} == {*range(K + 1)}


@pytest.mark.parametrize(("threshold", "lens"), [(0.0, {K}), (1.0, {0})])
def test_thresholds_that_cut_nothing_and_all(
    tmp_path: Path, target: Path, plain: list[Outcome], threshold: float, lens: set[int]
) -> None:
    """A threshold of 0 cuts no drafts, and one of 1 cuts all.

    Requests at their end are an exception: they have no room for drafts.
    """
    found = run(target, make_dspark(tmp_path, target, (0, 2), MASK), draft_confidence_threshold=threshold)
    assert found.outcomes == plain
    assert lens <= {*offered(found)}
    assert (found.speculation.num_draft_tokens == 0) == (threshold == 1.0)


def test_lengths_by_batch_size(tmp_path: Path, target: Path, plain: list[Outcome]) -> None:
    """Draft lengths by batch size change no token. A block has the same rows, whatever length the batch asks for."""
    draft = make_dspark(tmp_path, target, (0, 2), MASK, markov="rnn")
    fewer = run(target, draft, draft_len_schedule={3: K, 6: 2, 8: 1})
    assert fewer.outcomes == plain
    assert {0, 1, 2, K} <= {*offered(fewer)}


def test_a_threshold_wants_a_confidence_head(tmp_path: Path, target: Path) -> None:
    draft = make_dspark(tmp_path, target, (0, 2), MASK, confidence=False)
    run(target, draft)
    with pytest.raises(
        ConfigError, match=r"draft_confidence_threshold=0\.5: .* has no confidence head; leave it unset"
    ):
        run(target, draft, draft_confidence_threshold=0.5)
