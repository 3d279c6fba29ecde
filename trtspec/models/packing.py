"""Packing a whole model's linears for inference (see ops.packing for the layouts)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from trtspec.models.layers import Linear, PackedEmbedding


def pack_decoder(
    model: nn.Module, quantization: str | None = None, parts: Mapping[nn.Module, str | None] | None = None
) -> None:
    """Pack every Linear in `model` (a decoder, a draft head, or a step that holds both), in place.

    quantization: as of `Linear.pack`; `parts`: modules within `model` that have another. It goes for every linear but
    the lm_head (the one with `float_out`), which keeps the model's dtype, as embeddings and norms do: its rounding
    errors would go straight into the logits.

    An embedding tied to an lm_head becomes a view of the packed head, so that the matrix is held once. A draft head
    that shares its target's embedding or lm_head gets the packed ones where `model` holds both; otherwise call its
    `share` again once the target is packed.
    """
    linears: dict[int, Linear] = {}  # by the plain weight that is to be packed
    for module in list(model.modules()):
        if isinstance(module, Linear) and not module.is_packed:
            linears[id(module.weight)] = module
    tied = [
        (parent, name, linears[id(child.weight)])
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Embedding) and id(child.weight) in linears
    ]
    others = {id(module): own for part, own in (parts or {}).items() for module in part.modules()}
    for linear in linears.values():
        linear.pack(None if linear.float_out else others.get(id(linear), quantization))
    embeddings = {id(head): PackedEmbedding(head) for _, _, head in tied}
    for parent, name, head in tied:
        setattr(parent, name, embeddings[id(head)])
