"""Stand-ins for TensorRT's own attention: KVCacheUpdate and IAttention.

The sources are the docstrings of TensorRT's bindings and its operator reference (docs.nvidia.com, TensorRT operators).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fake_tensorrt.api import ENUMS, DataType
from tests.fake_tensorrt.layer import FLOATS, INTEGERS, Described, FakeLayer, FakeTensor, one_dtype

PACKED = ENUMS["AttentionIOForm"].PACKED_NHD


class Optional(FakeLayer):
    """A layer with inputs that are properties. properties: index of each such input."""

    properties: dict[str, int] = {}  # noqa: RUF012

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.properties:
            self._set_input(self.properties[name], value)

    def _vector(self, name: str, tensor: FakeTensor | None, size: int) -> None:
        if tensor is None or tensor.dtype != DataType.INT32 or len(tensor.shape) != 1 or tensor.shape[0] != size:
            self._refuse(f"{name} must be [{size}] INT32: {tensor and (tensor.dtype.name, tensor.shape)}")


class KVCacheUpdate(Optional):
    takes = ("cache", "update", "write_indices")
    properties = {"update_lengths": 3}  # noqa: RUF012

    def _describe(self, cache: FakeTensor, update: FakeTensor, starts: FakeTensor, *more: Any) -> list[Described]:
        one_dtype(self, cache, update)
        if cache._layer is not None or len(cache.shape) != 4 or -1 in cache.shape[1:] or cache.dtype not in FLOATS:
            self._refuse(f"the cache must be an input of the network, its sequence length fixed: {cache.shape}")
        if starts.dtype not in INTEGERS or starts.shape != cache.shape[:1]:
            self._refuse(f"write_indices {starts.dtype.name} {starts.shape} for {cache.shape}")
        return [(cache.dtype, cache.shape)]

    def _check_ends(self) -> None:
        """Check what is known only once the whole network is."""
        cache, update = self._given[:2]
        assert cache is not None
        assert update is not None
        if self._get_output(0)._role != "output":
            self._refuse("an updated cache must be an output of the network")
        if self._settings.get("update_form") != PACKED:
            self._refuse("only packed updates are done here")
        self._vector("update_lengths", [*self._given, None][3], cache.shape[0] + 1)
        if update.shape[1:] != (cache.shape[1], cache.shape[3]):
            self._refuse(f"an update {update.shape} of {cache.shape}")

    def _compute(self, given: list[Tensor | None]) -> list[Tensor]:
        cache, update, starts, ends = given
        assert cache is not None
        assert update is not None
        assert starts is not None
        assert ends is not None
        cache = cache.clone()
        if int(ends[0]) != 0 or int(ends[-1]) != len(update):
            self._refuse(f"update_lengths {ends.tolist()} of {len(update)} tokens")
        for slot, (start, first, end) in enumerate(
            zip(starts.tolist(), ends.tolist(), ends.tolist()[1:], strict=False)
        ):
            if start < 0 or start + end - first > cache.shape[2]:
                self._refuse(f"rows {start}..{start + end - first} of {cache.shape[2]}")
            cache[slot, :, start : start + end - first] = update[first:end].transpose(0, 1)
        return [cache]

    def _aliased(self, index: int) -> FakeTensor | None:
        return self._given[0]


class Attention(Optional):
    """Softmax of q k, without any scale, times v, for padded queries over padded keys.

    TensorRT-RTX 1.7 has no kernel for packed ones: it refuses them when it builds.
    """

    takes = ("query", "key", "value")
    properties = {"key_value_lengths": 3}  # noqa: RUF012

    def _describe(self, q: FakeTensor, k: FakeTensor, v: FakeTensor, *more: Any) -> list[Described]:
        one_dtype(self, q, k, v)
        fits = len(q.shape) == 4 and k.shape == v.shape and q.shape[0] == k.shape[0]
        if not fits or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
            self._refuse(f"{q.shape}, {k.shape}, {v.shape}")
        if more:
            self._vector("key_value_lengths", more[0], k.shape[0])
        return [(q.dtype, q.shape)]

    def _compute(self, given: list[Tensor | None]) -> list[Tensor]:
        q, k, v, lengths = given
        assert q is not None
        assert k is not None
        assert v is not None
        assert lengths is not None
        if self._settings["causal_kind"].name != "LOWER_RIGHT":
            self._refuse("only a LOWER_RIGHT mask is done here")
        out = torch.full_like(q, torch.nan)  # of rows without keys
        for slot, length in enumerate(lengths.tolist()):
            group, first = q.shape[1] // k.shape[1], max(q.shape[2] - length, 0)
            keys, values = (x[slot, :, :length].float().repeat_interleave(group, 0) for x in (k, v))
            scores = q[slot, :, first:].float() @ keys.transpose(1, 2)  # [heads, rows, length]
            rows = scores.shape[1]
            hidden = torch.arange(length) > torch.arange(rows)[:, None] + (length - rows)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[slot, :, first:] = (weights @ values).to(q.dtype)
        return [out]
