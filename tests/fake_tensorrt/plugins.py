"""Our plugins, for the networks of this folder.

They are described as the quick-deploy plugins declare themselves (tests/contract compares the two), and computed by the
reference ops.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from trtspec_plugins.tensorrt.signatures import PLUGINS, plugin_of

import trtspec.ops  # noqa: F401  (defines the ops)
from tests.fake_tensorrt.api import DataType, Misuse
from tests.fake_tensorrt.layer import FakeTensor

_ABSENT = {"penalties": torch.float32, "bias_values": torch.float32, "sinks": torch.float32, "vocab_ids": torch.int64}
_I32, _I64, _F32, _BOOL = DataType.INT32, DataType.INT64, DataType.FLOAT, DataType.BOOL
_TAKES = {  # rank and dtype of inputs (None: any float dtype, the same for all)
    "q": (3, None), "k": (3, None), "v": (3, None), "k_cache": (4, None), "v_cache": (4, None), "cu_q_lens": (1, _I32),
    "kv_lens": (1, _I32), "block_tables": (2, _I32), "logits": (2, _F32), "positions": (1, _I64), "ban_ids": (2, _I32),
    "ban_until": (2, _I64), "temperatures": (1, _F32), "top_ks": (1, _I32), "top_ps": (1, _F32), "min_ps": (1, _F32),
    "greedy": (1, _BOOL), "seeds": (1, _I64), "vocab_ids": (1, _I64), "sampled": (2, _I64), "draft_tokens": (2, _I64),
    "draft_lens": (1, _I32), "forced_accept": (1, _I32), "emits": (1, _BOOL), "history": (2, _I32),
    "prompt_lens": (1, _I64), "penalties": (2, _F32), "bias_ids": (2, _I32), "bias_values": (2, _F32),
    "allow_mask": (2, _I32), "x": (2, None), "weight": (2, None), "values": (2, _I32),
    "x_scales": (2, _F32), "x_sums": (2, _I32), "panels": (3, _I32), "scales": (3, DataType.HALF), "zeros": (3, _I32),
    "bias": (1, None),
}  # fmt: skip


class FakePlugin:
    """An IPluginV3 of ours."""

    def __init__(self, name: str, attributes: Mapping[str, int | float]) -> None:
        self.name, self.attributes = name, dict(attributes)
        self.inputs = PLUGINS[name].inputs
        if tuple(attributes) != PLUGINS[name].attributes and set(attributes) != set(PLUGINS[name].attributes):
            raise Misuse(f"{name} has attributes {PLUGINS[name].attributes}, given are {attributes}")
        self.aliases = {1: 3, 2: 4} if name == "SpecAttentionChained" else {}

    def describe(self, layer: Any, *given: FakeTensor) -> list[tuple[Any, tuple[int, ...]]]:
        named = dict(zip(self.inputs, given, strict=True))
        floats = set()
        for name, tensor in named.items():
            rank, dtype = _TAKES[name]
            if len(tensor.shape) != rank or tensor.dtype != (dtype or tensor.dtype):
                layer._refuse(f"{self.name} takes {name} of rank {rank}, {dtype}: {tensor.dtype}, {tensor.shape}")
            if dtype is None:
                floats.add(tensor.dtype)
        if len(floats) > 1:
            layer._refuse(f"{self.name} takes one dtype: {floats}")
        first = given[0]
        if self.name.startswith("SpecAttention"):
            if -1 in (*first.shape[1:], *given[3].shape[2:]):
                layer._refuse("numbers of heads and head sizes must be fixed")
            return [(one.dtype, one.shape) for one in (first, given[3], given[4])]
        if self.name == "QuantizeGroups":
            (rows, depth), group = first.shape, self.attributes["group"]
            return [(_I32, (rows, depth // 4)), (_F32, (rows, depth // group)), (_I32, (rows, depth // group))]
        if self.name == "GroupsLinear":
            return [(first.dtype, (first.shape[0], given[-1].shape[0]))]
        if self.name == "LinearLogits":
            return [(_F32, (first.shape[0], given[1].shape[0]))]
        if self.name == "SpecAccept":
            return [(_I64, first.shape), (_I64, first.shape[:1])]
        return [(first.dtype, first.shape)] if self.name.startswith("ProcessLogits") else [(_I64, first.shape[:1])]

    def compute(self, given: list[Tensor | None]) -> list[Tensor]:
        op = getattr(torch.ops.trtspec, PLUGINS[self.name].torch_op).default
        named: dict[str, Any] = dict(zip(self.inputs, given, strict=True)) | self.attributes
        if self.name == "LinearLogits":
            named |= {"bias": None, "x_scale": None, "out_features": named["weight"].shape[0], "float_out": True}
        for argument in op._schema.arguments:
            if argument.name not in named:
                named[argument.name] = torch.empty(0, dtype=_ABSENT.get(argument.name, torch.int32))
        made = op(**named)
        return list(made) if isinstance(made, tuple) else [made]


def fake_plugin_of(
    op: str, present: Collection[str], attributes: Mapping[str, int | float], chained: bool
) -> tuple[FakePlugin, tuple[str, ...]]:
    """Return a plugin and the names of its inputs, as trtspec.backends.tensorrt.network.PluginOf does."""
    name = plugin_of(op, present, chained)
    return FakePlugin(name, attributes), PLUGINS[name].inputs
