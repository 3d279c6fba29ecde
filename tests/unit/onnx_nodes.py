"""ONNX models of one of our ops, run by ONNX Runtime, and inputs for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

onnx = pytest.importorskip("onnx", reason="pip install 'trtspec[onnx]'")
ort = pytest.importorskip("onnxruntime", reason="pip install 'trtspec[onnx]'")

from onnx import helper  # noqa: E402

from trtspec.backends.onnx.functions import functions, with_bodies  # noqa: E402

INF, NAN, NO_TOKEN = float("inf"), float("nan"), 2**63 - 1
OUTPUTS = {  # (name, rank); the dtype is that of the first input
    "SpecAttention": (("out", 3), ("new_k_cache", 4), ("new_v_cache", 4)),
    "KvCompact": (("new_k_cache", 4), ("new_v_cache", 4)),
    "ProcessLogits": (("processed", 2),),
    "SpecSample": (("tokens", 1),),
    "SpecAccept": (("tokens", 2), ("num_tokens", 1)),
}
INPUTS = {body.name: tuple(body.input) for body in functions()}
seeds = st.integers(0, 2**31)


def model_of(op: str, present: tuple[tuple[str, str, int], ...], opset: int = 21, **attributes: Any) -> Any:
    """A model of one node. present: (name, numpy dtype, rank) of the inputs that it has; the others are left out."""
    known = {name: np.dtype(dtype) for name, dtype, _ in present}
    first = "<i8" if op == "SpecSample" else present[0][1]
    outputs = [(name, first, rank) for name, rank in OUTPUTS[op]]
    names = [name if name in known else "" for name in INPUTS[op]]
    while not names[-1]:
        names.pop()
    node = helper.make_node(op, names, [name for name, *_ in outputs], "the_op", domain="trtspec", **attributes)
    graph = helper.make_graph([node], "one_node", [_info(*one) for one in present], [_info(*one) for one in outputs])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("trtspec", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _info(name: str, dtype: str, rank: int) -> Any:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, kind, [f"{name}_{axis}" for axis in range(rank)])


@functools.cache
def session_of(op: str, present: tuple[tuple[str, str, int], ...], attributes: tuple[tuple[str, Any], ...]) -> Any:
    model = with_bodies(model_of(op, present, **dict(attributes)))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds_of(op: str, tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Inputs of the node by name, without zero-size optional tensors."""
    assert len(tensors) == len(INPUTS[op]) - (2 if op == "SpecAttention" and len(tensors) == 10 else 0)  # no trees
    optional = {"SpecAttention": 8, "ProcessLogits": 2, "SpecSample": 2}.get(op, 99)
    names = enumerate(zip(INPUTS[op], tensors, strict=False))
    return {n: t.contiguous().numpy() for i, (n, t) in names if t.numel() or i < optional or n == "positions"}


def run(op: str, tensors: Sequence[Tensor], **attributes: Any) -> list[Tensor]:
    feeds = feeds_of(op, tensors)
    present = tuple((name, array.dtype.str, array.ndim) for name, array in feeds.items())
    outputs = session_of(op, present, tuple(attributes.items())).run(None, feeds)
    return [torch.from_numpy(output) for output in outputs]


NO_INT = torch.empty(0, dtype=torch.int32)
NO_FLOAT = torch.empty(0)


def generation(
    widths: Sequence[int], lengths: Sequence[int], heads: int = 4, kv_heads: int = 2, depth: int = 64, seed: int = 0
) -> list[Tensor]:
    """Inputs of causal SpecAttention with blocks of 16. A token has the same q, k and v in any batch."""
    g = torch.Generator().manual_seed(seed)
    longest = 1024
    tokens = [torch.randn(len(widths), longest, n, depth, generator=g) for n in (heads, kv_heads, kv_heads)]
    columns = longest // 16
    tables = torch.arange(1, len(widths) * columns + 1).view(len(widths), columns)
    caches = []
    for x in tokens[1:]:
        cache = torch.zeros(1 + len(widths) * columns, 16, kv_heads, depth)
        for b, length in enumerate(lengths):  # later tokens are not in the cache yet
            cache[tables[b]] = (x[b] * (torch.arange(longest) < length)[:, None, None]).view(columns, 16, kv_heads, -1)
        caches.append(cache)
    rows = [torch.cat([x[b, n - w : n] for b, (n, w) in enumerate(zip(lengths, widths, strict=True))]) for x in tokens]
    bounds = torch.tensor([0, *widths]).cumsum(0).to(torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32)
    return [*rows, *caches, bounds, ends, tables.to(torch.int32), NO_INT, NO_FLOAT]


ATTRIBUTES = {"scale": 0.125, "window": 0, "softcap": 0.0}


def random_logits(seed: int, rows: int, vocab: int, spread: float = 3.0, tied: bool = False) -> Tensor:
    x = spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return x.round() if tied else x
