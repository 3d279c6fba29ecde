"""N-gram lookup against a brute-force lookup; the draft model's own cache against a freshly prefilled one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.tiny import Case, Outcome, draw_cases, make_target, perturbed, run_alone, run_together
from tests.unit.drafting import GREEDY, drafts_of, question
from trtspec import LLM
from trtspec.core import Proposal, StepInputs, StepOutputs
from trtspec.methods.draft_model.drafter import ChainDrafter
from trtspec.methods.ngram.drafter import NGramDrafter
from trtspec.protocols import DraftRequest
from trtspec.sampling_params import RequestSampling

SAMPLED = RequestSampling(greedy=False, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=42)


# -- n-gram --------------------------------------------------------------------------------------------------------


def brute_force(tokens: list[int], smallest: int, largest: int, latest: bool, K: int) -> list[int]:
    """Drafts by the definition: longest n first, then the earliest (or latest) place where the suffix occurs."""
    for n in range(largest, smallest - 1, -1):
        starts = [i for i in range(len(tokens) - n) if n < len(tokens) and tokens[i : i + n] == tokens[-n:]]
        if starts:
            start = starts[-1 if latest else 0] + n
            return tokens[start : start + K]
    return []


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30) | st.lists(st.integers(0, 9), min_size=1, max_size=30),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    latest=st.booleans(),
    K=st.integers(1, 6),
)
def test_ngram_equals_brute_force(tokens: list[int], sizes: list[int], latest: bool, K: int) -> None:
    smallest, largest = sizes
    proposal = NGramDrafter(smallest, largest, latest).propose([question(tokens, K)])
    assert drafts_of(proposal) == [brute_force(tokens, smallest, largest, latest, K)]


@pytest.mark.parametrize(
    ("tokens", "n", "K", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, 3, [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 2, 3, [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 1, 2, [6, 2]),
    ],
)
def test_ngram_known_cases(tokens: list[int], n: int, K: int, expected: list[int]) -> None:
    assert drafts_of(NGramDrafter(n, n).propose([question(tokens, K)])) == [expected]


@pytest.mark.parametrize(
    ("tokens", "smallest", "largest", "latest", "expected"),
    [
        ([7, 1, 7, 2, 7], 1, 1, False, [1, 7, 2]),
        ([7, 1, 7, 2, 7], 1, 1, True, [2, 7]),  # cut where the context ends
        ([1, 2, 9, 2, 8, 1, 2], 1, 2, True, [9, 2, 8]),  # a longer n wins over a later place
        ([5, 5, 5, 5], 2, 2, True, [5]),  # an occurrence may overlap the suffix
        ([5, 5, 5, 5], 2, 2, False, [5, 5]),
        ([1, 2, 3], 1, 3, False, []),
        ([1], 1, 3, False, []),
        ([4, 4], 2, 2, False, []),  # the suffix itself is no occurrence
    ],
)
def test_ngram_edges(tokens: list[int], smallest: int, largest: int, latest: bool, expected: list[int]) -> None:
    assert drafts_of(NGramDrafter(smallest, largest, latest).propose([question(tokens, 3)])) == [expected]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8))
def test_ngram_keeps_up_with_requests_that_grow(pieces: list[list[int]]) -> None:
    """A drafter that keeps a copy of a request's tokens between calls returns the drafts of a fresh drafter."""
    drafter = NGramDrafter(1, 3)
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece
        (kept,), (fresh,) = (drafts_of(d.propose([question(tokens, 4)])) for d in (drafter, NGramDrafter(1, 3)))
        assert kept == fresh


def test_ngram_keeps_requests_apart() -> None:
    drafter = NGramDrafter(1, 1)
    both = [question([1, 2, 1], 1, request_id=0), question([1, 3, 1], 1, request_id=1)]
    drafter.propose(both)
    assert drafts_of(drafter.propose(both)) == [[2], [3]]


def test_ngram_forgets_a_request() -> None:
    drafter = NGramDrafter(1, 1)
    drafter.propose([question([1, 2, 1], 1)])
    drafter.forget(0)
    assert drafts_of(drafter.propose([question([1, 3, 1], 1)])) == [[3]]


def test_ngram_lookup_does_not_change_its_argument() -> None:
    tokens = np.array([1, 2, 1])
    NGramDrafter(1, 2).lookup(tokens)
    assert tokens.tolist() == [1, 2, 1]


# -- the chain -----------------------------------------------------------------------------------------------------

BLOCK = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    return perturbed(target, noise=0.15)


class Watched:
    """An executable that records the number of rows of each launch."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.rows: list[int] = []

    def run(self, inputs: StepInputs) -> StepOutputs:
        self.rows.append(len(inputs.input_ids))
        return self.inner.run(inputs)


@pytest.fixture(scope="module")
def model(target: Path, draft: Path) -> Any:
    """The draft model on its own cache of 63 blocks."""
    llm = LLM(target, {"model": str(draft), "num_speculative_tokens": 3}, num_kv_blocks=64, block_size=BLOCK)
    drafter: Any = llm.engine.loop.proposer.drafter
    return drafter.model


LENGTHS = (1, 23, 5, 12, 1)


def questions(K: int = 3, lengths: Sequence[int] = LENGTHS) -> list[DraftRequest]:
    """Requests of different lengths, each in blocks of its own. Every other one is sampled."""
    asked, block = [], 1
    for i, length in enumerate(lengths):
        tokens = [(3 * i + 5 * j * j) % 16 for j in range(length)]
        count = -(-(length + K) // BLOCK)
        sampling = GREEDY if i % 2 else replace(SAMPLED, seed=i)
        asked.append(question(tokens, K, i, sampling, range(block, block + count)))
        block += count
    return asked


@pytest.fixture(scope="module")
def one_by_one(model: Any) -> list[list[int]]:
    """Drafts of each request when it is proposed alone, in launches of any size."""
    return [drafts_of(ChainDrafter(model, 1000).propose([asked]))[0] for asked in questions()]


@pytest.mark.parametrize("max_num_tokens", [5, 6, 7, 11, 40, 42, 1000])
def test_catching_up_in_small_launches_gives_the_same_drafts(
    model: Any, one_by_one: list[list[int]], max_num_tokens: int
) -> None:
    assert drafts_of(ChainDrafter(model, max_num_tokens).propose(questions())) == one_by_one


@pytest.mark.parametrize("max_num_tokens", [5, 6, 7, 11, 40, 42, 1000])
def test_no_launch_has_more_rows_than_allowed(model: Any, max_num_tokens: int) -> None:
    watched = Watched(model)
    ChainDrafter(watched, max_num_tokens).propose(questions())
    assert max(watched.rows) <= max_num_tokens


@pytest.mark.parametrize("max_num_tokens", [5, 11, 42, 1000])
def test_catching_up_takes_as_few_launches_as_possible(model: Any, max_num_tokens: int) -> None:
    watched = Watched(model)
    ChainDrafter(watched, max_num_tokens).propose(questions())
    K = 3
    assert len(watched.rows) == -(-sum(LENGTHS) // max_num_tokens) + K - 1


@pytest.mark.parametrize("valid", range(22))
def test_only_missing_rows_are_computed_and_the_drafts_are_the_same(
    model: Any, one_by_one: list[list[int]], valid: int
) -> None:
    """A request whose first `valid` tokens the draft has seen gets the same drafts from the missing rows alone."""
    asked = questions()[1]
    ChainDrafter(model, 1000).propose([replace(asked, tokens=asked.tokens[: valid + 1])])
    watched = Watched(model)
    proposal = ChainDrafter(watched, 1000).propose([replace(asked, draft_kv_len=valid)])
    assert (watched.rows[0], drafts_of(proposal)) == (LENGTHS[1] - valid, [one_by_one[1]])


def test_no_row_is_read_twice_where_there_is_no_launch_for_a_chain(model: Any, one_by_one: list[list[int]]) -> None:
    watched: Any = Watched(model)
    asked = [one for one in questions() if len(one.tokens) > 1]
    refusing: Any = SimpleNamespace(run_chain=lambda inputs, num_tokens: None)
    drafts = drafts_of(ChainDrafter(watched, 1000, False, refusing).propose(asked))
    assert drafts == [own for own, length in zip(one_by_one, LENGTHS, strict=True) if length > 1]
    assert sum(watched.rows) == sum(len(one.tokens) for one in asked) + 2 * len(asked)


def test_each_request_gets_the_length_it_asked_for(model: Any, one_by_one: list[list[int]]) -> None:
    """Requests that want fewer drafts run along with requests that want more."""
    asked = [replace(one, max_draft_len=1 + i % 3) for i, one in enumerate(questions())]
    expected = [drafts[: 1 + i % 3] for i, drafts in enumerate(one_by_one)]
    assert drafts_of(ChainDrafter(model, 1000).propose(asked)) == expected


def test_running_along_never_leaves_a_requests_own_blocks(model: Any, one_by_one: list[list[int]]) -> None:
    """A request with blocks for one draft only does not harm the drafts of a neighbour that wants three."""
    short, long = questions(lengths=(5, 23))
    short = replace(short, max_draft_len=1, block_table=short.block_table[:2])
    _, drafts = drafts_of(ChainDrafter(model, 1000).propose([short, long]))
    (alone,) = drafts_of(ChainDrafter(model, 1000).propose([long]))
    assert drafts == alone


def test_the_last_draft_is_the_one_without_draft_kv(model: Any) -> None:
    asked = [replace(one, max_draft_len=1 + i % 3) for i, one in enumerate(questions())]
    proposal = ChainDrafter(model, 1000).propose(asked)
    assert proposal.draft_kv_lens is not None
    assert proposal.draft_kv_lens.tolist() == [len(one.tokens) + one.max_draft_len - 1 for one in asked]


def test_greedy_drafting_ignores_the_noise(model: Any) -> None:
    asked = questions()[0]
    (arg_max,) = drafts_of(ChainDrafter(model, 1000, greedy=True).propose([asked]))
    assert arg_max == drafts_of(ChainDrafter(model, 1000).propose([replace(asked, sampling=GREEDY)]))[0]


# -- the chain in an engine that speculates now and then -----------------------------------------------------------


class Checked:
    """A chain drafter that compares each proposal with that of a draft that prefills the whole request again."""

    def __init__(self, inner: ChainDrafter, fresh: ChainDrafter, num_blocks: int) -> None:
        self.inner = inner
        self.fresh = fresh
        self.num_blocks = num_blocks
        self.different: list[tuple[DraftRequest, list[int], list[int]]] = []
        self.longest_catch_up = 0  # rows of one generating request that had to be prefilled

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        # A second cache with block ids of its own, so that the engine's cache stays untouched.
        proposal = self.inner.propose(requests)
        for request, drafts in zip(requests, drafts_of(proposal), strict=True):
            blocks = range(1, self.num_blocks)
            (expected,) = drafts_of(self.fresh.propose([replace(request, block_table=blocks, draft_kv_len=0)]))
            if drafts != expected:
                self.different.append((request, drafts, expected))
            if request.draft_kv_len > 0:
                self.longest_catch_up = max(self.longest_catch_up, len(request.tokens) - request.draft_kv_len)
        return proposal

    def forget(self, request_id: int) -> None:
        self.inner.forget(request_id)


CASES = [Case(c.prompt, replace(c.params, stop=(), ignore_eos=True)) for c in draw_cases(16, seed=6, most_prompt=40)]
SCHEDULES: dict[str, dict[str, Any]] = {
    "always": {},
    "up to 3 requests": {"draft_len_schedule": {3: 3}},
    "less with more": {"draft_len_schedule": {1: 3, 2: 2, 3: 1}},
    "disabled above 3": {"disable_by_batch_size": 3},
    "none for 2 to 3": {"num_speculative_tokens_per_batch_size": ((1, 1, 3), (2, 3, 0), (4, 8, 2))},
}


@pytest.fixture(scope="module", params=SCHEDULES)
def watched_engine(request: pytest.FixtureRequest, target: Path, draft: Path) -> tuple[Checked, list[Outcome], str]:
    """Run cases under a schedule of K, and return (drafter, outcomes, schedule).

    Requests arrive a few at a time, so that K changes.
    """
    speculation = {"model": str(draft), "num_speculative_tokens": 3}
    limits: dict[str, Any] = {"max_batch_size": 6, "max_num_tokens": 24, "block_size": BLOCK}
    second = LLM(target, speculation, **{**limits, "num_kv_blocks": 64})
    llm = LLM(target, {**speculation, **SCHEDULES[request.param]}, **{**limits, "num_kv_blocks": 18})
    inner: Any = llm.engine.loop.proposer.drafter
    fresh: Any = second.engine.loop.proposer.drafter
    checked = Checked(inner, fresh, 64)
    llm.engine.loop.proposer.drafter = checked
    return checked, run_together(llm.engine, CASES, seed=1).outcomes, request.param


@pytest.fixture(scope="module")
def plain(target: Path) -> list[Outcome]:
    with LLM(target) as llm:
        return run_alone(llm.engine, CASES)


def test_drafts_are_those_of_a_freshly_prefilled_draft(watched_engine: tuple[Checked, list[Outcome], str]) -> None:
    assert watched_engine[0].different == []


def test_outputs_are_those_of_plain_decoding(
    watched_engine: tuple[Checked, list[Outcome], str], plain: list[Outcome]
) -> None:
    assert watched_engine[1] == plain


def test_gaps_without_speculation_were_caught_up(watched_engine: tuple[Checked, list[Outcome], str]) -> None:
    """Speculation with pauses leaves gaps of more than two rows, which are caught up.

    Without pauses, the draft lacks at most two rows: the last accepted draft and the bonus token.
    """
    checked, _, schedule = watched_engine
    assert (checked.longest_catch_up > 2) == (schedule != "always")


def test_noise_of_the_target_makes_drafts_agree_more_often(target: Path, draft: Path) -> None:
    """At temperature 1, a draft that samples with the target's noise agrees more often than the draft's arg-max."""
    cases = [Case(c.prompt, replace(c.params, temperature=1.0, top_k=None, top_p=None, min_p=None)) for c in CASES]
    lengths = []
    for method in (None, "greedy"):
        speculation = {"model": str(draft), "num_speculative_tokens": 3, "draft_sample_method": method}
        with LLM(target, speculation) as llm:
            lengths.append(run_together(llm.engine, cases).speculation.acceptance_length)
    assert lengths[0] > lengths[1]


def test_a_proposal_is_int64_ids_and_int32_lengths(model: Any) -> None:
    proposal = ChainDrafter(model, 1000).propose(questions())
    assert (proposal.draft_tokens.dtype, proposal.draft_lens.dtype) == (torch.int64, torch.int32)
