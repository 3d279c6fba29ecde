"""A one-engine step as a torch.export graph: tensors in, tensors out, every size but the model's own left open.

Two graphs of one module: `uniform`, where every request brings exactly K + 1 rows, and the ragged one, where contexts,
chunks of them and generations of any draft length mix. Each is exported with mutating ops (eager, AOTInductor) or, from
a functional step, with functional ones (ONNX, TensorRT), whose new KV tensors are outputs too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from trtspec.core import AttnMetadata, KVLayer, SamplingTensors, SpecMetadata, StepInputs
from trtspec.modes import SpeculativeDecodingMode
from trtspec.workers.step import OneEngineStep

_ATTN = ("kv_lens", "block_tables", "tree_mask")  # cu_q_lens follows from seq_lens, and so its size from B
_SPEC = ("seq_lens", "gather_ids", "draft_tokens", "draft_lens", "next_prompt_token", "forced_accept")
_SAMPLING = tuple(field.name for field in fields(SamplingTensors))
INPUT_NAMES = ("input_ids", *_ATTN, *_SPEC, *_SAMPLING)
OUTPUT_NAMES = ("new_tokens", "num_tokens", "next_draft_tokens", "next_new_tokens", "next_kv_lens")


class GraphStep(nn.Module):
    """A step whose arguments are tensors alone; K' drafts for the next step are part of the graph."""

    def __init__(self, step: OneEngineStep, next_draft_len: int) -> None:
        super().__init__()
        self.step = step
        self.next_draft_len = next_draft_len

    def forward(
        self, tensors: dict[str, Tensor], kv: list[KVLayer]
    ) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """tensors: those of INPUT_NAMES -> those of OUTPUT_NAMES, and the new KV of a functional step (else none)."""
        kv = list(kv)
        old = list(kv)
        outputs = self.step(self._inputs(tensors), kv)
        values = (
            outputs.verdict.tokens,
            outputs.verdict.num_tokens,
            outputs.proposal.draft_tokens,
            outputs.next_new_tokens,
            outputs.next_kv_lens,
        )
        changed = [new for new, before in zip(kv, old, strict=True) if new is not before]
        return dict(zip(OUTPUT_NAMES, values, strict=True)), changed

    def _inputs(self, tensors: dict[str, Tensor]) -> StepInputs:
        spec_tensors: dict[str, Any] = {name: tensors[name] for name in _SPEC}
        spec = SpecMetadata(
            spec_dec_mode=SpeculativeDecodingMode.NONE,  # nothing in a graph asks
            max_draft_len=self.step.worker.max_draft_len,
            request_ids=(),
            sampling=SamplingTensors(**{name: tensors[name] for name in _SAMPLING}),
            next_draft_len=self.next_draft_len,
            **spec_tensors,
        )
        cu_q_lens = F.pad(spec.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        attn = AttnMetadata(cu_q_lens=cu_q_lens, **{name: tensors[name] for name in _ATTN})
        return StepInputs(tensors["input_ids"], attn, spec)


def graph_inputs(inputs: StepInputs) -> dict[str, Tensor]:
    """A step's inputs as the graph takes them."""
    spec = inputs.spec
    return {
        "input_ids": inputs.input_ids,
        **{name: getattr(inputs.attn, name) for name in _ATTN},
        **{name: getattr(spec, name) for name in _SPEC},
        **{name: getattr(spec.sampling, name) for name in _SAMPLING},
    }


def export_step(
    step: OneEngineStep, example: StepInputs, kv: Sequence[KVLayer], uniform: bool = False
) -> ExportedProgram:
    """The graph that `example` is a case of; call it as `program.module()(graph_inputs(inputs), list(kv))`.

    Fixed by the example: K, K', which sampling fields are in use (not zero-size), and their widths. Open: B, T, G, the
    block tables' width and the number of KV blocks; a uniform graph has T = B * (K + 1) rows of B generations. The
    example needs two or more of each, generations and contexts alike (unless uniform): torch.export takes a size of 1
    or 0 for a constant.
    """
    tensors = graph_inputs(example)
    with torch.no_grad():
        return torch.export.export(
            GraphStep(step, example.spec.next_draft_len).eval(),
            (tensors, list(kv)),
            dynamic_shapes=(_dynamic_shapes(example, tensors, uniform), _kv_shapes(len(kv))),
            strict=False,
        )


def _dynamic_shapes(example: StepInputs, tensors: Mapping[str, Tensor], uniform: bool) -> dict[str, Any]:
    B = Dim("B", min=1, max=4096)
    if uniform:
        width = example.spec.runtime_draft_len + 1
        T = R = B if width == 1 else width * B
        G = B
    else:
        T, R, G = Dim("T", min=1, max=2**20), Dim("R", min=1, max=2**16), Dim("G", min=1, max=4096)
    first = {
        "input_ids": T,
        "gather_ids": R,
        "draft_tokens": G,
        **dict.fromkeys(("kv_lens", "block_tables", "seq_lens", "draft_lens", "next_prompt_token", "forced_accept"), B),
        **dict.fromkeys(_SAMPLING, R),
    }
    shapes: dict[str, Any] = {
        name: {0: first[name]} if name in first and tensor.shape[0] else None for name, tensor in tensors.items()
    }
    shapes["block_tables"] = {0: B, 1: Dim("M", min=1, max=2**16)}
    return shapes


def _kv_shapes(num_layers: int) -> list[Any]:
    blocks = Dim("blocks", min=2, max=2**24)
    return [({0: blocks}, {0: blocks})] * num_layers
