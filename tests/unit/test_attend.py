"""Rows that are written to a cache layer next to the rows that attention writes."""

from __future__ import annotations

import torch

from trtspec.core import AttnMetadata
from trtspec.models.attention import FunctionalAttend, PagedAttend


def test_rows_are_written_in_place_or_to_new_tensors() -> None:
    """PagedAttend writes rows in place, FunctionalAttend to new tensors.

    Layer 1 has 3 blocks of 4 tokens; the rows go to its slots 5, 11 and 0.
    """
    attn, slots = AttnMetadata.of([3], [3], [[1, 2]]), torch.tensor([5, 11, 0])
    k, v = torch.randn(3, 1, 2), torch.randn(3, 1, 2)
    old = [(torch.zeros(3, 4, 1, 2), torch.zeros(3, 4, 1, 2)) for _ in range(2)]
    for kind in (FunctionalAttend, PagedAttend):
        kv = list(old)
        attend = kind(attn, kv, (None, None))
        attend.write(1, slots, k, v)
        assert [torch.equal(*pair) for pair in zip(attend.read(1, slots), (k, v), strict=True)] == [True, True]
        assert torch.equal(kv[1][0][1, 1], k[0])
        assert torch.equal(kv[1][1][2, 3], v[1])
        assert int(kv[1][0].count_nonzero()) == 6
        assert kv[0] is old[0]
        assert (kv[1][0] is old[1][0]) == (kind is PagedAttend)
        assert bool(old[1][0].any()) == (kind is PagedAttend)
