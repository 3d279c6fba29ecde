"""Packing of all linears of a model for inference. ops.packing describes the layouts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from trtspec.models.layers import Linear, PackedEmbedding


def pack_decoder(
    model: nn.Module,
    quantization: str | None = None,
    draft: nn.Module | None = None,
    draft_quantization: str | None = None,
    floats: bool = True,
    excluded: nn.Module | None = None,
    lm_head: str | None = None,
) -> None:
    """Pack every Linear in `model` (a decoder, a draft head, or a step that holds both), in place.

    quantization, as in `Linear.pack`: applies to every linear but the lm_head (the one with `float_out`). The lm_head
    keeps the model's dtype, as embeddings and norms do: its rounding errors would go straight into the logits.
    lm_head: quantization of the lm_head, if it is to have one all the same. An embedding tied to it then has the same
    rounded numbers. ValueError if the lm_head is quantised already.
    draft: a module within `model`.
    draft_quantization: applies to all linears that only `draft` uses. Its own lm_head is one of them, unless it is tied
    to an embedding: errors in its logits cost only acceptance, and every pass reads it.
    floats: False leaves linears that are not quantised as they are.
    excluded: another model. Its linears stay as they are, also where `model` shares them.

    An embedding tied to an lm_head becomes a view of the packed head, so that the matrix is stored once. A draft head
    that shares its target's embedding or lm_head gets the packed ones if `model` holds both. Otherwise call its `share`
    again once the target is packed.
    """
    others = set() if excluded is None else set(excluded.modules())
    linears: dict[int, Linear] = {}  # by id of the plain weight to be packed
    for module in list(model.modules()):
        if isinstance(module, Linear) and not module.is_packed and module not in others:
            linears[id(module.weight)] = module
    tied = [
        (parent, name, linears[id(child.weight)], child.weight.dtype)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Embedding) and id(child.weight) in linears
    ]
    targets = {id(module) for module in _modules_without(model, draft)}
    if lm_head is not None and any(
        isinstance(module, Linear) and module.float_out and module.scales.numel() and id(module) in targets
        for module in set(model.modules()) - others
    ):
        raise ValueError("the checkpoint's lm_head is quantised already; leave lm_head_quantization unset")
    tied_heads = {id(head) for _, _, head, _ in tied}
    for linear in linears.values():
        is_draft = id(linear) not in targets
        kept = linear.float_out and (not is_draft or id(linear) in tied_heads)
        kind = lm_head if kept and not is_draft else None if kept else draft_quantization if is_draft else quantization
        if floats or kind is not None:
            linear.pack(kind)
    embeddings = {id(head): PackedEmbedding(head, dtype) for _, _, head, dtype in tied if head.is_packed}
    for parent, name, head, _ in tied:
        if head.is_packed:
            setattr(parent, name, embeddings[id(head)])


def _modules_without(model: nn.Module, left_out: nn.Module | None) -> Iterator[nn.Module]:
    """All modules that `model` reaches other than through `left_out`."""
    if model is left_out:
        return
    yield model
    for child in model.children():
        yield from _modules_without(child, left_out)
