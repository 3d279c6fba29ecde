"""kv_compact moves the accepted path of a tree to consecutive rows, as a loop in plain Python does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtspec.ops import kv_compact, kv_compact_


@dataclass(frozen=True)
class Request:
    """A request with `start` committed rows.

    Of the step's rows after them, those of `path` were accepted, in this order.
    """

    start: int
    path: list[int]


@dataclass(frozen=True)
class Case:
    """Arguments of one call. Every cache row holds its own number, so that its content identifies the row."""

    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    starts: Tensor
    path: Tensor

    @classmethod
    def of(cls, requests: list[Request], block_size: int, dtype: torch.dtype = torch.float32) -> Case:
        """Make a case whose tables cover the longest path, with blocks in random order."""
        longest = max(len(request.path) for request in requests)
        columns = -(-max(r.start + max([longest, 1, *(i + 1 for i in r.path)]) for r in requests) // block_size)
        blocks = torch.randperm(len(requests) * columns, generator=torch.Generator().manual_seed(0)) + 1
        rows = torch.arange((len(blocks) + 1) * block_size * 2 * 4)
        k_cache = rows.view(len(blocks) + 1, block_size, 2, 4).to(dtype)
        return cls(
            k_cache,
            -k_cache,
            blocks.view(len(requests), columns).to(torch.int32),
            torch.tensor([request.start for request in requests], dtype=torch.int32),
            torch.tensor([[*r.path, *[-1] * (longest - len(r.path))] for r in requests], dtype=torch.int64),
        )

    def row(self, cache: Tensor, request: int, position: int) -> Tensor:
        block_size = cache.shape[1]
        return cache[self.block_tables[request, position // block_size], position % block_size]

    def expected(self, cache: Tensor) -> Tensor:
        moved = cache.clone()
        for b, path in enumerate(self.path.tolist()):
            start = int(self.starts[b])
            for i, source in enumerate(path):
                if source >= 0:
                    self.row(moved, b, start + i).copy_(self.row(cache, b, start + source))
        return moved

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.k_cache, self.v_cache, self.block_tables, self.starts, self.path


# Paths of a tree have rows in ascending order. The op does not rely on it, so any distinct rows are drawn, too.
increasing = st.lists(st.integers(0, 20), max_size=8, unique=True).map(sorted)
arbitrary = st.lists(st.integers(0, 20), max_size=8, unique=True)
requests = st.builds(Request, st.integers(0, 40), increasing | arbitrary)


@settings(max_examples=200, deadline=None)
@given(
    drawn=st.lists(requests, min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 3, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_against_a_loop(drawn: list[Request], block_size: int, dtype: torch.dtype) -> None:
    """All rows of both caches equal those of a loop, except in scratch.

    Sources and targets overlap, in one request and across blocks.
    """
    case = Case.of(drawn, block_size, dtype)
    expected = case.expected(case.k_cache), case.expected(case.v_cache)
    kv_compact_(*case.arguments())
    assert torch.equal(case.k_cache[1:], expected[0][1:])
    assert torch.equal(case.v_cache[1:], expected[1][1:])


def test_overlap_moves_what_was_there_before() -> None:
    """Rows are moved with the content that they had before.

    Row 1 is a target before it is a source; a copy in the wrong order would duplicate row 2 or row 1.
    """
    for path in ([1, 2, 3], [0, 2, 1], [3, 0]):
        case = Case.of([Request(5, path)], block_size=4)
        old = [case.row(case.k_cache, 0, 5 + row).clone() for row in path]
        kv_compact_(*case.arguments())
        assert all(torch.equal(case.row(case.k_cache, 0, 5 + i), row) for i, row in enumerate(old))


def test_a_chain_moves_nothing() -> None:
    case = Case.of([Request(7, [0, 1, 2, 3]), Request(0, [0, 1])], block_size=4)
    before = case.k_cache.clone()
    kv_compact_(*case.arguments())
    assert torch.equal(case.k_cache[1:], before[1:])


def test_functional_form_is_the_mutating_one_without_side_effects() -> None:
    case = Case.of([Request(7, [1, 4, 5]), Request(0, [2])], block_size=4)
    before = [tensor.clone() for tensor in case.arguments()]
    k_cache, v_cache = kv_compact(*case.arguments())
    assert all(torch.equal(a, b) for a, b in zip(case.arguments(), before, strict=True))
    kv_compact_(*case.arguments())
    assert torch.equal(k_cache, case.k_cache)
    assert torch.equal(v_cache, case.v_cache)


@pytest.mark.parametrize("form", ["kv_compact", "kv_compact_"])
def test_opcheck(form: str) -> None:
    case = Case.of([Request(7, [1, 4, 5]), Request(0, [2])], block_size=4)
    op = getattr(torch.ops.trtspec, form).default
    torch.library.opcheck(op, case.arguments(), test_utils=("test_schema", "test_faketensor"))
