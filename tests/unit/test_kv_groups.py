"""KV groups: layers that share a block table, rows that go to scratch, and reads of a layer's cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trtspec.core import AttnMetadata, KVLayer, KVSpec
from trtspec.kv.groups import layer_groups, with_group_tables
from trtspec.kv.pool import allocate_layers
from trtspec.models.attention import FunctionalAttend, PagedAttend
from trtspec.ops.attention import row_slots

BLOCK = 4


def two_requests() -> AttnMetadata:
    """Metadata of 3 and 2 rows, up to token 6 and 9, in two groups."""
    attn = AttnMetadata.of([3, 2], [6, 9], [[1, 2], [3, 4, 5]])
    return with_group_tables(attn, (0, 1), [[[7, 6], [9]]])


def test_layers_of_one_window_are_a_group() -> None:
    assert layer_groups((None, None)) == (0, 0)
    assert layer_groups((16, None, 16, 8)) == (0, 1, 0, 2)
    assert layer_groups(()) == ()


def test_each_group_has_a_table() -> None:
    attn = two_requests()
    assert attn.tables_of(0) is attn.block_tables
    assert attn.tables_of(1).tolist() == [[7, 6], [9, 0]]
    shared = replace(attn, group_tables=None)
    assert shared.tables_of(1) is attn.block_tables
    assert with_group_tables(shared, (0, 0), []).group_tables is None


@pytest.mark.parametrize("tables", [[], [[[1]]], [[[1], [2]], [[3], [4]]]])
def test_tables_that_are_too_few_or_too_many(tables: list[list[list[int]]]) -> None:
    attn = AttnMetadata.of([1, 1], [1, 1], [[1], [2]])
    with pytest.raises(ValueError, match="each of 2 requests in each of 1 groups"):
        with_group_tables(attn, (0, 1), tables)


def test_metadata_made_from_it_keeps_all_tables() -> None:
    attn = two_requests()
    for made in (attn.advance(), attn.last_rows(), attn.widen(2)):
        assert made.group_tables is attn.group_tables
    assert attn.last_rows().positions(2).tolist() == [5, 8]
    assert attn.advance().positions(2).tolist() == [6, 9]


def test_requests_that_are_not_kept_lie_in_scratch_in_every_group() -> None:
    kept = two_requests().keep(torch.tensor([False, True]))
    assert kept.block_tables.tolist() == [[0, 0, 0], [3, 4, 5]]
    assert kept.tables_of(1).tolist() == [[0, 0], [9, 0]]
    assert replace(two_requests(), group_tables=None).keep(torch.tensor([True, True])).group_tables is None


def random_layers(number: int) -> tuple[KVLayer, ...]:
    layers = allocate_layers([KVSpec(1, 8)] * number, 10, BLOCK, torch.float32)
    for cache in (cache for layer in layers for cache in layer):
        cache.normal_(generator=torch.Generator().manual_seed(0))
    return layers


def test_each_layer_writes_where_its_group_says() -> None:
    """Rows that a group's table does not cover go to scratch in that group alone.

    Here these are tokens 7 and 8 of the second request.
    """
    attn = two_requests()
    kv = allocate_layers([KVSpec(1, 8)] * 2, 10, BLOCK, torch.float32)
    attend = PagedAttend(attn, kv, (None, 4), (0, 1))
    rows = torch.ones(5, 1, 8)
    for layer in range(2):
        attend(layer, rows, rows, rows)
    written = [sorted(set(k[:, :, 0, 0].nonzero()[:, 0].tolist())) for k, _ in kv]
    assert written == [[1, 2, 4, 5], [0, 6, 7]]


@pytest.mark.parametrize("kind", [PagedAttend, FunctionalAttend])
def test_reading_changes_nothing(kind: type[PagedAttend]) -> None:
    """A query attends over the rows and the tokens before them, and changes no bit of the cache.

    This holds for a group whose table is too short, too.
    """
    attn, before = two_requests(), random_layers(2)
    kv = [(k.clone(), v.clone()) for k, v in before]
    q = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(1))
    attend = kind(attn, kv, (None, None), (0, 1))
    for layer in range(2):
        out = attend.query(layer, q, scale=0.5)
        for row, (request, position) in enumerate([(0, 3), (0, 4), (0, 5), (1, 7), (1, 8)]):
            seen = torch.arange(position + 1)
            slots = row_slots(attn.tables_of(layer), torch.full_like(seen, request), seen, BLOCK)
            k, v = (cache.flatten(0, 1)[slots, 0] for cache in before[layer])  # [p, D]
            torch.testing.assert_close(out[row], (q[row] @ k.T * 0.5).softmax(-1) @ v)
    for now, then in zip(kv, before, strict=True):
        assert all(map(torch.equal, now, then))
    assert not torch.equal(attend.query(0, q), attend.query(0, q, scale=0.5))
