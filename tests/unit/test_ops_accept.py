"""spec_accept accepts the leading run of drafts that agree, as a loop in plain Python does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtspec.ops import spec_accept


@dataclass(frozen=True)
class Row:
    """One request: the target's K+1 draws, the drafts, the forced count, and whether it emits.

    Drafts after draft_len are junk. forced: -1 is off.
    """

    sampled: list[int]
    drafts: list[int]
    draft_len: int
    forced: int = -1
    emits: bool = True


def expected(row: Row) -> list[int]:
    """Tokens that a row emits, by the definition."""
    if not row.emits:
        return []
    accepted = 0
    for i in range(row.draft_len):
        agrees = row.drafts[i] == row.sampled[i]
        if not (agrees if row.forced < 0 else i < row.forced):
            break
        accepted += 1
    return row.sampled[: accepted + 1]


def arguments(rows: list[Row]) -> tuple[Tensor, ...]:
    K = len(rows[0].drafts)
    return (
        torch.tensor([row.sampled for row in rows], dtype=torch.int64),
        torch.tensor([row.drafts for row in rows], dtype=torch.int64).view(len(rows), K),
        torch.tensor([row.draft_len for row in rows], dtype=torch.int32),
        torch.tensor([row.forced for row in rows], dtype=torch.int32),
        torch.tensor([row.emits for row in rows]),
    )


def accept(*rows: Row) -> list[list[int]]:
    """Return the tokens of each row, after a check that they are padded with -1."""
    tokens, num_tokens = spec_accept(*arguments(list(rows)))
    out = []
    for row, n in zip(tokens.tolist(), num_tokens.tolist(), strict=True):
        assert set(row[n:]) <= {-1}
        out.append(row[:n])
    return out


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Batches over a vocabulary of three ids, so that runs of every length occur."""
    K = draw(st.integers(0, 6))
    tokens = st.integers(0, 2)
    row = st.builds(
        Row,
        sampled=st.lists(tokens, min_size=K + 1, max_size=K + 1),
        drafts=st.lists(st.integers(-1, 2), min_size=K, max_size=K),
        draft_len=st.integers(0, K),
        forced=st.sampled_from([-1, -1, -1, 0, 1, K, K + 3]),
        emits=st.booleans(),
    )
    return draw(st.lists(row, min_size=1, max_size=8))


@settings(max_examples=200, deadline=None)
@given(rows=batches())
def test_against_a_loop(rows: list[Row]) -> None:
    assert accept(*rows) == [expected(row) for row in rows]


@pytest.mark.parametrize(
    ("drafts", "sampled", "tokens"),
    [
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),  # all match: the bonus follows
        ([1, 2, 3], [1, 5, 3, 4], [1, 5]),  # first mismatch at 1: the target's 5 is emitted, later matches are not
        ([1, 2, 3], [7, 2, 3, 4], [7]),
        ([-1, 2, 3], [0, 2, 3, 4], [0]),  # draft id -1 is always rejected
        ([1, 2, -1], [1, 2, 0, 4], [1, 2, 0]),
    ],
)
def test_cases_of_vllm(drafts: list[int], sampled: list[int], tokens: list[int]) -> None:
    assert accept(Row(sampled, drafts, draft_len=3)) == [tokens]


def test_unequal_draft_lengths_share_a_batch() -> None:
    rows = [Row([1, 2, 3, 4], [1, 2, 3], n) for n in range(4)]
    assert accept(*rows) == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def test_junk_past_the_draft_length_is_never_accepted() -> None:
    assert accept(Row([0, 0, 0], [0, 0], draft_len=1)) == [[0, 0]]


@pytest.mark.parametrize("forced", range(6))
def test_forced_acceptance_gives_at_most_the_drafts_and_one(forced: int) -> None:
    """Forced acceptance holds whatever the drafts are. The emitted tokens are the target's draws."""
    wrong = Row([1, 2, 3, 4], [9, 9, 9], draft_len=3, forced=forced)
    short = Row([1, 2, 3, 4], [9, 9, 9], draft_len=2, forced=forced)
    assert [len(tokens) for tokens in accept(wrong, short)] == [min(forced, 3) + 1, min(forced, 2) + 1]
    assert accept(wrong) == [[1, 2, 3, 4][: min(forced, 3) + 1]]


def test_forced_acceptance_also_cuts_what_agrees() -> None:
    assert accept(Row([1, 2, 3, 4], [1, 2, 3], draft_len=3, forced=1)) == [[1, 2]]


def test_a_chunk_that_is_not_the_last_emits_nothing() -> None:
    agreeing = Row([1, 2, 3], [1, 2], draft_len=2, emits=False)
    forced = Row([1, 2, 3], [1, 2], draft_len=2, forced=2, emits=False)
    assert accept(agreeing, forced) == [[], []]


def test_without_drafts_each_row_emits_its_draw() -> None:
    assert accept(Row([5], [], 0), Row([6], [], 0, emits=False)) == [[5], []]


def test_types_of_the_result() -> None:
    tokens, num_tokens = spec_accept(*arguments([Row([1, 2], [1], 1), Row([1, 2], [1], 1)]))
    assert (tokens.dtype, tokens.shape) == (torch.int64, (2, 2))
    assert (num_tokens.dtype, num_tokens.shape) == (torch.int64, (2,))


@pytest.mark.parametrize("K", [0, 3])
def test_opcheck(K: int) -> None:
    args = arguments([Row([1] * (K + 1), [1] * K, K), Row([1] * (K + 1), [2] * K, K, emits=False)])
    torch.library.opcheck(torch.ops.trtspec.spec_accept.default, args, test_utils=("test_schema", "test_faketensor"))
