"""The values of a step: packed rows, their positions, and the tensors that follow from them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, row_requests
from trtspec.modes import SpeculativeDecodingMode
from trtspec.sampling_params import NEVER, RequestSampling

GREEDY = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
SAMPLED = RequestSampling(greedy=False, temperature=0.5, top_k=0, top_p=1.0, min_p=0.0, seed=2)

ragged = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100)), min_size=1, max_size=6)


def of_requests(requests: list[tuple[int, int]]) -> AttnMetadata:
    """Metadata of requests that are given as (rows, tokens before them)."""
    q_lens, kv_lens = [rows for rows, _ in requests], [rows + before for rows, before in requests]
    return AttnMetadata.of(q_lens, kv_lens, [[1]] * len(requests))


# --- AttnMetadata -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(requests=ragged)
def test_rows_belong_to_requests_in_order(requests: list[tuple[int, int]]) -> None:
    """Requests without rows are skipped, wherever they are in the batch."""
    expected = [b for b, (rows, _) in enumerate(requests) for _ in range(rows)]
    attn = of_requests(requests)
    assert row_requests(attn.cu_q_lens, len(expected)).tolist() == expected


@settings(deadline=None)
@given(requests=ragged)
def test_a_requests_rows_are_the_last_of_its_tokens(requests: list[tuple[int, int]]) -> None:
    expected = [old + i for rows, old in requests for i in range(rows)]
    attn = of_requests(requests)
    assert attn.positions(len(expected)).tolist() == expected


def test_from_host_lists() -> None:
    attn = AttnMetadata.of([3, 1], [3, 20], [[4], [2, 9]])
    assert attn.cu_q_lens.tolist() == [0, 3, 4]
    assert attn.kv_lens.tolist() == [3, 20]
    assert attn.block_tables.tolist() == [[4, 0], [2, 9]]  # padded with the scratch block
    assert attn.tree_mask.numel() == 0
    assert {t.dtype for t in (attn.cu_q_lens, attn.kv_lens, attn.block_tables, attn.tree_mask)} == {torch.int32}
    assert attn.batch_size == 2


def test_advance_is_one_row_per_request_one_token_further() -> None:
    attn = AttnMetadata.of([3, 1], [3, 20], [[4], [2, 9]])
    tree = dataclasses.replace(attn, tree_mask=torch.ones(4, 1, dtype=torch.int32))
    further = tree.advance()
    assert further.cu_q_lens.tolist() == [0, 1, 2]
    assert further.kv_lens.tolist() == [4, 21]
    assert further.positions(2).tolist() == [3, 20]
    assert further.tree_mask.numel() == 0
    assert further.block_tables is attn.block_tables
    assert {t.dtype for t in (further.cu_q_lens, further.kv_lens, further.tree_mask)} == {torch.int32}


def test_advance_changes_nothing_in_place() -> None:
    attn = AttnMetadata.of([3, 1], [3, 20], [[4], [2, 9]])
    attn.advance().advance()
    assert attn.cu_q_lens.tolist() == [0, 3, 4]
    assert attn.kv_lens.tolist() == [3, 20]


def test_step_values_are_frozen() -> None:
    attn = AttnMetadata.of([1], [1], [[1]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        attn.kv_lens = attn.kv_lens + 1  # type: ignore[misc]


# --- SamplingTensors --------------------------------------------------------------------------------------------------

OPTIONAL = ("seeds", "temperatures", "top_ks", "top_ps", "min_ps")


def test_greedy_rows_need_none_of_the_optional_tensors() -> None:
    tensors = SamplingTensors.of([GREEDY, GREEDY], [5, 6])
    assert tensors.greedy.tolist() == [True, True]
    assert tensors.positions.tolist() == [5, 6]
    assert [getattr(tensors, name).numel() for name in OPTIONAL] == [0] * 5
    assert tensors.ban_ids.numel() == 0


def test_one_sampled_row_brings_seeds_and_temperatures_for_all() -> None:
    tensors = SamplingTensors.of([GREEDY, SAMPLED], [5, 6])
    assert tensors.greedy.tolist() == [True, False]
    assert tensors.seeds.tolist() == [1, 2]
    assert tensors.temperatures.tolist() == [0.0, 0.5]
    assert [getattr(tensors, name).numel() for name in ("top_ks", "top_ps", "min_ps")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("field", "tensor", "value", "off"),
    [("top_k", "top_ks", 3, 0), ("top_p", "top_ps", 0.5, 1.0), ("min_p", "min_ps", 0.25, 0.0)],
)
def test_a_filter_that_one_row_uses_is_off_for_the_others(field: str, tensor: str, value: Any, off: Any) -> None:
    tensors = SamplingTensors.of([SAMPLED, dataclasses.replace(SAMPLED, **{field: value})], [5, 6])
    assert getattr(tensors, tensor).tolist() == [off, value]
    others = {"top_ks", "top_ps", "min_ps"} - {tensor}
    assert all(getattr(tensors, other).numel() == 0 for other in others)


def test_bans_are_padded_to_the_longest() -> None:
    banned = dataclasses.replace(GREEDY, ban_ids=(3, 8), ban_until=12)
    for_ever = dataclasses.replace(GREEDY, ban_ids=(4,), ban_until=NEVER)
    tensors = SamplingTensors.of([GREEDY, banned, for_ever], [5, 6, 7])
    assert tensors.ban_ids.tolist() == [[-1, -1], [3, 8], [4, -1]]
    assert tensors.ban_until[1:].tolist() == [[12, 12], [NEVER, NEVER]]


def test_every_tensor_has_the_type_that_the_ops_ask_for() -> None:
    """Tensors in use and unused ones have the dtypes of the ops. An empty list of ids alone would become floats."""
    full = RequestSampling(
        greedy=False, temperature=1.0, top_k=1, top_p=0.5, min_p=0.1, seed=-(2**63), ban_ids=(1,), ban_until=3
    )
    kinds = {
        "greedy": torch.bool,
        "positions": torch.int64,
        "seeds": torch.int64,
        "temperatures": torch.float32,
        "top_ks": torch.int32,
        "top_ps": torch.float32,
        "min_ps": torch.float32,
        "ban_ids": torch.int32,
        "ban_until": torch.int64,
    }
    for rows in ([GREEDY], [full]):
        tensors = SamplingTensors.of(rows, [0])
        assert {name: getattr(tensors, name).dtype for name in kinds} == kinds


def test_advancing_the_draw_moves_only_the_positions() -> None:
    tensors = SamplingTensors.of([SAMPLED], [5])
    further = tensors.advance()
    assert further.positions.tolist() == [6]
    assert tensors.positions.tolist() == [5]
    assert further.seeds is tensors.seeds


# --- SpecMetadata -----------------------------------------------------------------------------------------------------


def metadata(num_contexts: int, drafts: list[list[int]], max_draft_len: int = 4) -> SpecMetadata:
    """Metadata of contexts of two rows each, then one generation per list of drafts. All lists have one length."""
    K, B = (len(drafts[0]) if drafts else 0), num_contexts + len(drafts)
    q_lens = [2] * num_contexts + [K + 1] * len(drafts)
    attn = AttnMetadata.of(q_lens, [n + 5 for n in q_lens], [[1]] * B)
    rows = num_contexts + len(drafts) * (K + 1)
    return dataclasses.replace(
        SpecMetadata.plain(range(B), attn, SamplingTensors.of([GREEDY] * rows, [0] * rows)),
        spec_dec_mode=SpeculativeDecodingMode.NGRAM,
        max_draft_len=max_draft_len,
        draft_tokens=torch.tensor(drafts, dtype=torch.int64).view(len(drafts), K),
        draft_lens=torch.tensor([0] * num_contexts + [K] * len(drafts), dtype=torch.int32),
    )


def test_logits_rows_per_request() -> None:
    """R rows become [B, K+1]; the last row of a context or a short proposal is repeated."""
    spec = metadata(2, [[7, 8], [9, 6]])
    rows = torch.arange(2 + 2 * 3)
    assert spec.per_request(rows).tolist() == [[0, 0, 0], [1, 1, 1], [2, 3, 4], [5, 6, 7]]
    short = dataclasses.replace(spec, draft_lens=torch.tensor([0, 0, 1, 2], dtype=torch.int32))
    assert short.per_request(rows[:7]).tolist() == [[0, 0, 0], [1, 1, 1], [2, 3, 3], [4, 5, 6]]
    none = dataclasses.replace(spec, draft_lens=torch.zeros(4, dtype=torch.int32))
    assert none.per_request(rows[:4]).tolist() == [[0] * 3, [1] * 3, [2] * 3, [3] * 3]


def test_rows_and_owners_of_random_batches() -> None:
    """Each logits row belongs to the request that reads it, also where proposals are short."""
    rng = random.Random(0)
    for _ in range(100):
        C, G, K = rng.randrange(4), rng.randrange(1, 5), rng.randrange(5)
        lens = [0] * C + [rng.randint(0, K) for _ in range(G)]
        rows = sum(lens) + len(lens)
        spec = dataclasses.replace(
            metadata(C, [[0] * K] * G),
            draft_lens=torch.tensor(lens, dtype=torch.int32),
            gather_ids=torch.arange(rows),
        )
        owners = [b for b, n in enumerate(lens) for _ in range(n + 1)]
        assert spec.row_owners().tolist() == owners
        read = [[r for r in range(rows) if owners[r] == b] for b in range(C + G)]
        assert spec.logits_rows().tolist() == [
            [own[min(j, n)] for j in range(K + 1)] for own, n in zip(read, lens, strict=True)
        ]


def test_uniform_metadata_needs_no_lengths() -> None:
    spec = metadata(0, [[7, 8], [9, 6]])
    uniform = dataclasses.replace(spec, is_uniform=True, draft_lens=spec.draft_lens * 0)
    assert uniform.logits_rows().tolist() == spec.logits_rows().tolist()


def test_logits_rows_of_contexts_alone() -> None:
    assert metadata(3, []).per_request(torch.arange(3)).tolist() == [[0], [1], [2]]


def test_logits_rows_of_generations_alone() -> None:
    assert metadata(0, [[1], [2]]).per_request(torch.arange(4)).tolist() == [[0, 1], [2, 3]]


def test_drafts_per_request_are_none_for_contexts() -> None:
    assert metadata(1, [[7, 8], [9, 6]]).drafts_per_request().tolist() == [[-1, -1], [7, 8], [9, 6]]


def test_numbers_of_a_batch() -> None:
    spec = metadata(2, [[7, 8]], max_draft_len=4)
    assert (spec.batch_size, spec.num_contexts, spec.num_generations) == (3, 2, 1)
    assert spec.runtime_draft_len == 2
    assert spec.max_total_draft_tokens == 4


@pytest.mark.parametrize(("max_draft_len", "extra"), [(0, 0), (1, 0), (2, 1), (5, 4)])
def test_drafting_may_write_k_minus_one_further_rows(max_draft_len: int, extra: int) -> None:
    assert metadata(1, [], max_draft_len).num_extra_kv_tokens == extra


def test_a_plain_batch_draws_one_token_after_each_last_row() -> None:
    attn = AttnMetadata.of([3, 1, 2], [3, 20, 9], [[1]] * 3)
    spec = SpecMetadata.plain([4, 5, 6], attn, SamplingTensors.of([GREEDY] * 3, [3, 20, 9]))
    assert spec.spec_dec_mode is SpeculativeDecodingMode.NONE
    assert spec.request_ids == (4, 5, 6)
    assert spec.seq_lens.tolist() == [3, 1, 2]
    assert spec.gather_ids.tolist() == [2, 3, 5]
    assert (spec.num_contexts, spec.num_generations, spec.runtime_draft_len) == (3, 0, 0)
    assert spec.next_prompt_token.tolist() == [-1, -1, -1]  # all of them emit
    assert spec.forced_accept.tolist() == [-1, -1, -1]
    assert spec.draft_lens.tolist() == [0, 0, 0]
    assert spec.next_draft_len == 0


def test_sampling_of_one_row_per_request() -> None:
    """Rows come in the order of the selection. Parameters that no selected row uses stay zero-size."""
    banned = dataclasses.replace(SAMPLED, ban_ids=(3,), ban_until=12, top_k=4)
    chosen = SamplingTensors.of([GREEDY, SAMPLED, banned], [5, 6, 7]).select(torch.tensor([2, 0]))
    assert chosen.positions.tolist() == [7, 5]
    assert chosen.greedy.tolist() == [False, True]
    assert chosen.seeds.tolist() == [2, 1]
    assert chosen.top_ks.tolist() == [4, 0]
    assert chosen.ban_ids.tolist() == [[3], [-1]]
    assert chosen.top_ps.numel() == 0
