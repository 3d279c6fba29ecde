"""Signatures of the plugins: each has an op and some of its optional inputs. Pure data, without TensorRT or torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """A plugin's signature: the op that it computes and the op's inputs that it takes, in the plugin's order.

    aliases: to TensorRT the new caches are the old ones. Otherwise they are outputs of their own, which the caller
    binds to the old ones' addresses.
    """

    op: str  # op_type of the ONNX node; in snake case, the name of the torch op
    torch_op: str
    inputs: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    aliases: bool = False


_SAMPLE = ("logits", "greedy", "seeds", "positions")
_ACCEPT = ("sampled", "draft_tokens", "draft_lens", "forced_accept", "emits")
_ATTENTION = ("q", "k", "v", "k_cache", "v_cache", "cu_q_lens", "kv_lens", "block_tables")
_SCORES = ("scale", "window", "softcap")
_BANS, _FILTERS = ("ban_ids", "ban_until"), ("temperatures", "top_ks", "top_ps", "min_ps")
_CONSTRAINTS = ("history", "prompt_lens", "penalties", "bias_ids", "bias_values")

PLUGINS: dict[str, Signature] = {
    "SpecAttention": Signature("SpecAttention", "spec_attention", _ATTENTION, _SCORES),
    "SpecAttentionChained": Signature("SpecAttention", "spec_attention", _ATTENTION, _SCORES, aliases=True),
    "ProcessLogits": Signature("ProcessLogits", "process_logits", ("logits", "positions", *_BANS, *_FILTERS)),
    "ProcessLogitsConstrained": Signature(
        "ProcessLogits",
        "process_logits",
        ("logits", "positions", *_CONSTRAINTS, *_BANS, "allow_mask", *_FILTERS),
    ),
    "SpecSample": Signature("SpecSample", "spec_sample", _SAMPLE),
    "SpecSampleVocab": Signature("SpecSample", "spec_sample", (*_SAMPLE, "vocab_ids")),
    "SpecAccept": Signature("SpecAccept", "spec_accept", _ACCEPT),
    "LinearLogits": Signature("PackedLinear", "packed_linear", ("x", "weight")),
    "QuantizeGroups": Signature("QuantizeGroups", "quantize_groups", ("x",), ("group",)),
    "GroupsLinear": Signature(
        "GroupsLinear",
        "groups_linear",
        ("x", "values", "x_scales", "x_sums", "panels", "scales", "zeros", "bias"),
        ("bits",),
    ),
    "KvCompact": Signature(
        "KvCompact", "kv_compact", ("k_cache", "v_cache", "block_tables", "starts", "path"), aliases=True
    ),
}
"""Plugin name -> signature, in the namespace `trtspec`."""


def plugin_of(op: str, present: Collection[str], chained: bool = False) -> str:
    """Name of the plugin for an ONNX node of type `op` with the inputs `present` (names as in trtspec.ops).

    chained: whether another node changes the node's caches as well. LookupError if there is none; it lists the
    combinations that have one.
    """
    candidates = {name: signature for name, signature in PLUGINS.items() if signature.op == op}
    for name, signature in candidates.items():
        if set(signature.inputs) == set(present) and (signature.aliases == chained or len(candidates) == 1):
            return name
    known = "; ".join(f"{name}({', '.join(signature.inputs)})" for name, signature in candidates.items())
    raise LookupError(f"no TensorRT plugin for {op}({', '.join(present)}); there are: {known or 'none for this op'}")
