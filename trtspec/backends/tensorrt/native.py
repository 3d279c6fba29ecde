"""SpecAttention as TensorRT's own layers, KVCacheUpdate and IAttention, for networks without our attention plugin.

Their cache is linear: [slots, kv heads, tokens, head size], with a slot for each request that can run. KV block s + 1
is slot s and holds a whole sequence, so a block table of one column names the slot of a request. Both layers work by
slots, not by requests. So new keys and values are packed in the order of their slots. Queries are padded, as the layer
has no kernel for packed ones. Each slot has as many rows as the request with most rows: that is the size of the input
`slot_rows`. A slot's own rows are the last of these, so the lower right corner is that of its last row. Slots whose
request is not in the batch have no rows of their own.

The code assumes the following, from the operator reference and the bindings of TensorRT 11.4. No GPU has run it. The
TensorRT-RTX builder takes it (make contract-tensorrt-rtx).

- The rows of an update may be packed (AttentionIOForm.PACKED_NHD) while the cache is padded; a slot may have 0 rows.
- LOWER_RIGHT is the corner of a slot's own key_value_lengths. Rows without any key may have any result.
- The layer does not scale softmax(q k), so q is scaled before.
- A cache must be an input of the network, and its update an output. So a graph that writes a cache twice, as draft
  layers do for K > 1, cannot be built with these layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from trtspec.backends.graph_io import SLOT_ROWS
from trtspec.backends.tensorrt.writer import Size, Writer
from trtspec.errors import UnsupportedError


@dataclass(frozen=True)
class _Rows:
    """The order of a step's rows by slot, as int32 tensors of the network."""

    order: Any  # [T] row at each place in the order of slots
    padded: Any  # [slots, slot_rows] row that each place of the padded queries holds; any row where it holds none
    place: Any  # [T] place of each row among the slots * slot_rows places of the padded queries
    ends: Any  # [slots + 1] number of rows before each slot
    lengths: Any  # [slots] tokens in the cache after the step; 0 for a slot without a request in the batch
    starts: Any  # [slots] position in the cache of the first new token


class NativeAttention:
    """A writer of the SpecAttention nodes of one network. It adds the input slot_rows. slots: those of a cache."""

    def __init__(self, w: Writer, slots: int) -> None:
        self.w = w
        self.slots = slots
        self._known: dict[tuple[ir.Value, ...], _Rows] = {}
        self._slot_rows = w.network.add_input(SLOT_ROWS, w.trt.DataType.INT32, (-1,))

    def write(self, node: ir.Node) -> None:
        """Write a SpecAttention node. UnsupportedError for attention that is more than causal."""
        w, trt = self.w, self.w.trt
        w.node = node.name or node.op_type
        values = [value for value in node.inputs[:8] if value is not None]
        window, softcap = node.attributes["window"].as_int(), node.attributes["softcap"].as_float()
        if window or softcap or any(value is not None for value in node.inputs[8:]):
            raise UnsupportedError(
                f"node {w.node!r}: TensorRT's own attention is built without sliding windows, soft caps, sinks and "
                "tree masks; use attention = 'plugin'"
            )
        q, *updates = (w.get(value) for value in values[:3])
        rows = self._rows(w.size(q, 0), *values[5:])
        caches = []
        for cache, update in zip(values[3:5], updates, strict=True):
            packed = w.gather(update, rows.order)
            layer = w.network.add_kv_cache_update(w.get(cache), packed, rows.starts, trt.KVCacheMode.LINEAR)
            caches.append(w.out(layer))
            layer.update_form = trt.AttentionIOForm.PACKED_NHD
            layer.update_lengths = rows.ends
        q = w.binary("PROD", q, w.number(node.attributes["scale"].as_float(), q, 3))
        q = w.swap(w.gather(q, rows.padded))
        layer = w.network.add_attention_v2(
            q, *caches, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.LOWER_RIGHT
        )
        out = w.swap(w.out(layer))  # [slots, slot_rows, heads, head size]
        layer.key_value_lengths = rows.lengths
        layer.decomposable = True  # for cases without a fused kernel
        for value, tensor in zip(node.outputs, (w.gather(w.flat(out), rows.place), *caches), strict=True):
            w.set(value, tensor)

    def _rows(self, num_rows: Size, *metadata: ir.Value) -> _Rows:
        """Return the _Rows of (cu_q_lens, kv_lens, block_tables), written once and shared by all layers."""
        if metadata not in self._known:
            self._known[metadata] = self._write_rows(num_rows, *(self.w.get(value) for value in metadata))
        return self._known[metadata]

    def _write_rows(self, num_rows: Size, cu_q_lens: Any, kv_lens: Any, block_tables: Any) -> _Rows:
        w = self.w
        batch = w.size(kv_lens, 0)
        begins, ends = (w.slice(cu_q_lens, [first], [batch], [1]) for first in (0, 1))
        slot = w.binary("SUB", w.slice(block_tables, [0, 0], [batch, 1], [1, 1]), w.number(1, kv_lens, 2))  # [B, 1]
        slots = w.integers(range(self.slots), torch.int32)
        owns = w.binary("EQUAL", slot, slots)  # [B, slots]

        def by_slot(x: Any) -> Any:
            """Rearrange values of requests by slot: [B] -> [slots]."""
            return w.sum(w.out(w.network.add_select(owns, w.unsqueeze(x, [1]), w.number(0, x, 2))), 0)

        counts, lengths = by_slot(w.binary("SUB", ends, begins)), by_slot(kv_lens)
        slot_ends = w.cumulative_sum(counts)
        before = w.concat([w.number(0, kv_lens, 1), slot_ends], 0)
        row = w.count(num_rows, kv_lens)
        is_past = w.unary("NOT", w.binary("LESS", w.unsqueeze(row, [1]), ends))  # [T, B]
        owner = w.sum(w.cast(is_past, kv_lens.dtype), 1)  # number of requests that end at or before each row
        own_slot = w.gather(w.squeeze(slot, [1]), owner)
        to_end = w.binary("SUB", w.gather(ends, owner), row)  # rows from each row to the end of its request
        place = w.binary("SUB", w.gather(slot_ends, own_slot), to_end)
        order = w.out(w.network.add_scatter(w.binary("SUB", row, row), place, row, w.trt.ScatterMode.ELEMENT))
        width = w.cast(w.vector([w.size(self._slot_rows, 0)]), kv_lens.dtype)  # [1]
        from_end = w.binary("SUB", w.count(w.size(self._slot_rows, 0), kv_lens), width)  # [slot_rows], all negative
        places = w.binary("SUM", w.unsqueeze(slot_ends, [1]), from_end)
        padded = w.gather(order, w.binary("MAX", places, w.number(0, kv_lens, 2)))
        own_end = w.binary("PROD", w.binary("SUM", own_slot, w.number(1, kv_lens, 1)), width)
        starts = w.binary("SUB", lengths, counts)
        return _Rows(order, padded, w.binary("SUB", own_end, to_end), before, lengths, starts)
