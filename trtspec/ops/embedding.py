"""packed_embedding: rows of a packed matrix, for decoders whose embedding is the matrix of their lm_head."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trtspec.ops.dispatch import define
from trtspec.ops.packing import FLOATS, packed_rows


def _fake(ids: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, in_features: int) -> Tensor:
    dtype = weight.dtype if weight.dtype in FLOATS else torch.float32
    return weight.new_empty(ids.shape[0], in_features, dtype=dtype)


_op = define(
    "packed_embedding(Tensor ids, Tensor weight, Tensor scales, Tensor zeros, int in_features) -> Tensor",
    packed_rows,
    _fake,
)


def packed_embedding(ids: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, in_features: int) -> Tensor:
    """Rows `ids` [n] int64 of a matrix [N, K = in_features] in one of the layouts of `trtspec.ops.packing`: [n, K].

    The result has the weight's dtype, or fp32 if the weight is quantised. Ids are 0..N-1. Ids up to the end of the last
    panel give zeros, and the kernel raises for any other.

    It is an op of its own since a row of a panel is spread over as many cache lines as it has words. Compilers would
    read these lines again in every loop that uses the row.
    """
    return cast(Tensor, _op(ids, weight, scales, zeros, in_features))
