"""A draft's chain as one launch, on a thread that stands in for a GPU.

Drafts and cache equal those of the chain run pass by pass, whatever KV was known, missing or left over before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.async_stand_in import HostQueue
from tests.e2e.tiny import VOCAB, make_target, perturbed
from tests.unit.test_drafters import drafts_of
from trtspec import LLM
from trtspec.backends.cuda.chain_graph import chain_step
from trtspec.build import wiring
from trtspec.core import KVLayer
from trtspec.methods.draft_model.drafter import ChainDrafter
from trtspec.protocols import DraftRequest
from trtspec.sampling_params import RequestSampling

K, BLOCK = 4, 4
PLAIN = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
SAMPLED = replace(PLAIN, greedy=False, temperature=1.0, seed=-5)
FILTERED = replace(SAMPLED, top_k=9, top_p=0.9, min_p=0.01, seed=11)
BANNED = replace(SAMPLED, ban_ids=(1, 2, 3), ban_until=30, seed=12)
MUCH_BANNED = replace(PLAIN, ban_ids=tuple(range(9)), ban_until=40)  # more than a graph has room for


@dataclass(repr=False)
class Draft:
    """A draft model on the stand-in GPU, its cache, and the drafters that run it."""

    drafter: ChainDrafter
    kv: list[KVLayer]
    work: HostQueue

    def drafters(self, max_num_tokens: int, greedy: bool) -> tuple[ChainDrafter, ChainDrafter]:
        """Return a drafter that launches pass by pass, and one that may launch the whole chain."""
        each = self.drafter.model, max_num_tokens, greedy
        return ChainDrafter(*each), ChainDrafter(*each, self.drafter.chain)

    def cache(self) -> list[Tensor]:
        """A copy of all blocks but the scratch block."""
        return [tensor[1:].clone() for layer in self.kv for tensor in layer]

    def set_cache(self, cache: list[Tensor]) -> None:
        for tensor, old in zip((tensor for layer in self.kv for tensor in layer), cache, strict=True):
            tensor[1:] = old


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Draft]:
    work = HostQueue()
    target = make_target(tmp_path_factory.mktemp("chain"))
    model = perturbed(target, 0.15)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiring, "open_gpu", lambda: work.device)
        patch.setattr(wiring, "CudaQueue", lambda: work)
        patch.setattr(wiring, "free_memory", lambda device: 10**9)
        limits: dict[str, Any] = {"max_batch_size": 5, "max_num_tokens": 64, "num_kv_blocks": 80, "block_size": BLOCK}
        speculation = {"model": str(model), "num_speculative_tokens": K}
        with LLM(target, speculation, backend="cuda", **limits) as llm:
            drafter: Any = llm.engine.loop.proposer.drafter
            yield Draft(drafter, drafter.model.inner.kv, work)


@st.composite
def states(draw: st.DrawFn, least: int = 1, hows: tuple[RequestSampling, ...] = ()) -> list[DraftRequest]:
    """Requests with `least` known tokens or more, of which the draft lacks the last, the last two, or any number."""
    requests, block = [], 1
    for b in range(draw(st.integers(1, 5))):
        tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=least, max_size=30))
        missing = draw(st.sampled_from((1, 1, 2, 2, 3)) | st.integers(1, len(tokens)))
        wanted = draw(st.integers(1, K))
        blocks = -(-(len(tokens) + wanted - 1) // BLOCK)
        how = draw(st.sampled_from(hows or (PLAIN, SAMPLED, FILTERED, BANNED, MUCH_BANNED)))
        table = range(block, block + blocks)
        requests.append(DraftRequest(b, tokens, wanted, how, table, max(0, len(tokens) - missing)))
        block += blocks
    return requests


def make_cache(draft: Draft, requests: list[DraftRequest], rejected: int) -> list[Tensor]:
    """Fill the cache and return a copy of it.

    Each request has its valid rows and, after them, rows of rejected drafts. All other blocks are NaN.
    """
    draft.set_cache([torch.full_like(tensor, torch.nan) for tensor in draft.cache()])
    reader, _ = draft.drafters(64, False)
    for request in requests:
        known = list(request.tokens[: request.draft_kv_len])
        room = len(request.block_table) * BLOCK - len(known)
        for tokens in ([*known, *[rejected] * room], known):
            if tokens:
                reader.propose([replace(request, tokens=tokens, draft_kv_len=0, max_draft_len=1)])
    return draft.cache()


@settings(max_examples=30, deadline=None)
@given(states(), st.integers(0, VOCAB - 1), st.sampled_from([10, 17, 64]), st.booleans())
def test_drafts_and_cache_are_those_of_the_chain_pass_by_pass(
    draft: Draft, requests: list[DraftRequest], rejected: int, max_num_tokens: int, greedy: bool
) -> None:
    before = make_cache(draft, requests, rejected)
    given = []
    for drafter in draft.drafters(max_num_tokens, greedy):
        draft.set_cache(before)
        given.append((drafter.propose(requests), draft.cache()))
    (expected, cache), (proposal, own_cache) = given
    assert drafts_of(proposal) == drafts_of(expected)
    assert proposal.draft_kv_lens is not None
    assert expected.draft_kv_lens is not None
    assert proposal.draft_kv_lens.tolist() == expected.draft_kv_lens.tolist()
    assert all(torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)) for a, b in zip(own_cache, cache, strict=True))


@settings(max_examples=20, deadline=None)
@given(states(least=2, hows=(PLAIN, SAMPLED, FILTERED, BANNED)))
def test_it_is_one_launch_of_a_graph_where_no_more_than_two_rows_are_missing(
    draft: Draft, requests: list[DraftRequest]
) -> None:
    requests = [replace(one, draft_kv_len=max(one.draft_kv_len, len(one.tokens) - 2)) for one in requests]
    make_cache(draft, requests, 0)
    _, drafter = draft.drafters(64, False)
    drafter.propose(requests)  # captures the graphs that were not needed before
    work = draft.work
    before = work.num_submitted, work.num_replayed, work.num_captured
    drafter.propose(requests)
    assert (work.num_submitted, work.num_replayed, work.num_captured) == (before[0] + 1, before[1] + 1, before[2])


def test_a_longer_gap_is_read_in_first_and_no_further_than_it_must(draft: Draft) -> None:
    """A longer gap is prefilled in launches of limited size: 17 rows in launches of 10, then the chain."""
    tokens = [(5 * j * j) % VOCAB for j in range(19)]
    request = DraftRequest(0, tokens, 3, PLAIN, range(1, 7), 0)
    _, drafter = draft.drafters(10, False)
    drafter.propose([request])
    before = draft.work.num_submitted
    drafter.propose([request])
    assert draft.work.num_submitted == before + 3


def test_the_graphs_that_most_steps_need_are_there_at_the_start(draft: Draft) -> None:
    chain: Any = draft.drafter.chain
    keys = set(chain.inner._captured)
    assert {size for size, _, length, _ in keys if length == K} == {1, 2, 4, 5}


def test_an_id_that_nothing_could_be_drawn_for_is_not_read_in(draft: Draft) -> None:
    """While the whole vocabulary is banned, drafts are the id for no token. The next passes still read a valid id."""
    model: Any = draft.drafter.model
    request = DraftRequest(0, [1, 2, 3], 3, replace(PLAIN, ban_ids=tuple(range(VOCAB)), ban_until=5), range(1, 3), 0)
    inputs = draft.drafter._inputs([request], [2], [3])
    sampling = inputs.spec.sampling
    tensors = {
        "input_ids": torch.tensor([2, 3]),
        "kv_lens": inputs.attn.kv_lens,
        "block_tables": inputs.attn.block_tables,
        **vars(sampling),
    }
    drafts = chain_step(tensors, 3, model.inner.run_pass, VOCAB)
    nothing = torch.iinfo(torch.int64).max
    assert drafts[0, :2].tolist() == [nothing, nothing]
    assert 0 <= drafts[0, 2] < VOCAB
