"""The plugins' signatures, and their JIT form: TensorRT calls Python, which calls the op that torch has registered.

On a GPU that is the kernel registered for CUDA, or the op's reference if there is none. On host memory, as in the
tests, it is the CPU's. The references read sizes back to the host, so a JIT plugin cannot be captured in a CUDA graph.

TensorRT reads the annotations of these functions as objects, so this module has them evaluated (no `from __future__
import annotations`). TensorRT calls each `register` function with the attributes by name.
"""

from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp
import torch
from trtspec_plugins.tensorrt.memory import tensor_over
from trtspec_plugins.tensorrt.signatures import PLUGINS

Desc = trtp.TensorDesc
_EMPTY: dict[str, torch.dtype] = {  # inputs of ops that no plugin has, and optional ones
    "history": torch.int32,
    "prompt_lens": torch.int32,
    "penalties": torch.float32,
    "bias_ids": torch.int32,
    "bias_values": torch.float32,
    "allow_mask": torch.int32,
    "vocab_ids": torch.int64,
    "tree_mask": torch.int32,
    "sinks": torch.float32,
    "scales": torch.float32,
    "zeros": torch.uint8,
}


def _tensor(tensor: Any) -> torch.Tensor:
    return tensor_over(tensor.data_ptr, tensor.dtype, tuple(tensor.shape), tuple(tensor.strides))


def _op(name: str) -> Any:
    try:
        return getattr(torch.ops.trtspec, name).default
    except AttributeError as error:
        raise ImportError(f"torch has no op trtspec::{name}: import trtspec.ops first") from error


for _signature in PLUGINS.values():
    _op(_signature.torch_op)  # fails now rather than inside an engine


def _run(plugin: str, inputs: tuple[Any, ...], attributes: dict[str, Any], outputs: Any, stream: int) -> None:
    """Compute a plugin's op on TensorRT's tensors, on TensorRT's stream. Caches are changed in place."""
    signature = PLUGINS[plugin]
    named = dict(zip(signature.inputs, map(_tensor, inputs), strict=True))
    device = next(iter(named.values())).device
    in_place = "k_cache" in named
    op = _op(signature.torch_op + "_" * in_place)
    for argument in op._schema.arguments:
        if argument.name in _EMPTY and argument.name not in named:
            named[argument.name] = torch.empty(0, dtype=_EMPTY[argument.name], device=device)
    results = [_tensor(output) for output in outputs]
    if in_place:
        for name, result in zip(("k_cache", "v_cache"), results[-2:], strict=True):
            if result.data_ptr() != named[name].data_ptr():
                raise RuntimeError(
                    f"{plugin}: the new {name} is not the old one's memory; bind the engine's new caches to the "
                    "addresses of the old, and set PreviewFeature.ALIASED_PLUGIN_IO_10_03 on the builder's config"
                )
        results = results[:-2]
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            _store(op(**named, **attributes), results)
    else:
        _store(op(**named, **attributes), results)


def _store(values: Any, results: list[torch.Tensor]) -> None:
    values = () if values is None else values if isinstance(values, tuple) else (values,)
    for value, result in zip(values, results, strict=True):
        result.copy_(value)


@trtp.register("trtspec::SpecAttention")
def _(
    q: Desc, k: Desc, v: Desc, k_cache: Desc, v_cache: Desc, cu_q_lens: Desc, kv_lens: Desc, block_tables: Desc,
    scale: float, window: int, softcap: float,
) -> tuple[Desc, Desc, Desc]:  # fmt: skip
    """Causal attention without sinks: out [T, Hq, D] in q's dtype, and the changed caches, to be bound to the old."""
    return q.like(), k_cache.like(), v_cache.like()


@trtp.impl("trtspec::SpecAttention")
def _(
    q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, scale: float, window: int, softcap: float,
    outputs, stream,
):  # fmt: skip
    inputs = (q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables)
    _run("SpecAttention", inputs, {"scale": scale, "window": window, "softcap": softcap}, outputs, stream)


@trtp.register("trtspec::SpecAttentionChained")
def _(
    q: Desc, k: Desc, v: Desc, k_cache: Desc, v_cache: Desc, cu_q_lens: Desc, kv_lens: Desc, block_tables: Desc,
    scale: float, window: int, softcap: float,
) -> tuple[Desc, Desc, Desc]:  # fmt: skip
    """SpecAttention over caches that other nodes change as well: the caches are the old ones, changed."""
    return q.like(), k_cache.aliased(), v_cache.aliased()


@trtp.impl("trtspec::SpecAttentionChained")
def _(
    q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, scale: float, window: int, softcap: float,
    outputs, stream,
):  # fmt: skip
    inputs = (q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables)
    _run("SpecAttentionChained", inputs, {"scale": scale, "window": window, "softcap": softcap}, outputs, stream)


@trtp.register("trtspec::ProcessLogits")
def _(
    logits: Desc, positions: Desc, ban_ids: Desc, ban_until: Desc,
    temperatures: Desc, top_ks: Desc, top_ps: Desc, min_ps: Desc,
) -> Desc:  # fmt: skip
    """Bans, temperature, top-k, top-p and min-p, each of which may be zero-size: logits [R, V] fp32."""
    return logits.like()


@trtp.impl("trtspec::ProcessLogits")
def _(logits, positions, ban_ids, ban_until, temperatures, top_ks, top_ps, min_ps, outputs, stream):
    inputs = (logits, positions, ban_ids, ban_until, temperatures, top_ks, top_ps, min_ps)
    _run("ProcessLogits", inputs, {}, outputs, stream)


@trtp.register("trtspec::ProcessLogitsConstrained")
def _(
    logits: Desc, positions: Desc, history: Desc, prompt_lens: Desc, penalties: Desc, bias_ids: Desc,
    bias_values: Desc, ban_ids: Desc, ban_until: Desc, allow_mask: Desc, temperatures: Desc, top_ks: Desc,
    top_ps: Desc, min_ps: Desc,
) -> Desc:  # fmt: skip
    """ProcessLogits with biases, penalties and a mask, which have R rows without elements if not in use."""
    return logits.like()


@trtp.impl("trtspec::ProcessLogitsConstrained")
def _(
    logits, positions, history, prompt_lens, penalties, bias_ids, bias_values, ban_ids, ban_until, allow_mask,
    temperatures, top_ks, top_ps, min_ps, outputs, stream,
):  # fmt: skip
    inputs = (
        logits, positions, history, prompt_lens, penalties, bias_ids, bias_values, ban_ids, ban_until, allow_mask,
        temperatures, top_ks, top_ps, min_ps,
    )  # fmt: skip
    _run("ProcessLogitsConstrained", inputs, {}, outputs, stream)


@trtp.register("trtspec::SpecSample")
def _(logits: Desc, greedy: Desc, seeds: Desc, positions: Desc) -> Desc:
    """One token for each row of logits: tokens [R] int64."""
    return trtp.from_shape_expr((logits.shape_expr[0],), trt.int64)


@trtp.impl("trtspec::SpecSample")
def _(logits, greedy, seeds, positions, outputs, stream):
    _run("SpecSample", (logits, greedy, seeds, positions), {}, outputs, stream)


@trtp.register("trtspec::SpecSampleVocab")
def _(logits: Desc, greedy: Desc, seeds: Desc, positions: Desc, vocab_ids: Desc) -> Desc:
    """SpecSample for a draft with its own vocabulary: tokens [R] int64 are ids of the target's vocabulary."""
    return trtp.from_shape_expr((logits.shape_expr[0],), trt.int64)


@trtp.impl("trtspec::SpecSampleVocab")
def _(logits, greedy, seeds, positions, vocab_ids, outputs, stream):
    _run("SpecSampleVocab", (logits, greedy, seeds, positions, vocab_ids), {}, outputs, stream)


@trtp.register("trtspec::SpecAccept")
def _(sampled: Desc, draft_tokens: Desc, draft_lens: Desc, forced_accept: Desc, emits: Desc) -> tuple[Desc, Desc]:
    """tokens [B, K+1] int64, num_tokens [B] int64."""
    return sampled.like(), trtp.from_shape_expr((sampled.shape_expr[0],), trt.int64)


@trtp.impl("trtspec::SpecAccept")
def _(sampled, draft_tokens, draft_lens, forced_accept, emits, outputs, stream):
    _run("SpecAccept", (sampled, draft_tokens, draft_lens, forced_accept, emits), {}, outputs, stream)


@trtp.register("trtspec::LinearLogits")
def _(x: Desc, weight: Desc) -> Desc:
    """x [R, K] @ weight [N, K]^T, as accumulated: logits [R, N] fp32."""
    return trtp.from_shape_expr((x.shape_expr[0], weight.shape_expr[0]), trt.float32)


@trtp.impl("trtspec::LinearLogits")
def _(x, weight, outputs, stream):
    rest = {"bias": None, "x_scale": None, "out_features": weight.shape[0], "float_out": True}
    _run("LinearLogits", (x, weight), rest, outputs, stream)


@trtp.register("trtspec::QuantizeGroups")
def _(x: Desc, group: int) -> tuple[Desc, Desc, Desc]:
    """x [T, K] as int8 in groups: four to an int32 [T, K/4], scales [T, K/group] fp32, sums [T, K/group] int32."""
    T, K = x.shape_expr[0], x.shape_expr[1]
    groups = (T, K // group)
    return (
        trtp.from_shape_expr((T, K // 4), trt.int32),
        trtp.from_shape_expr(groups, trt.float32),
        trtp.from_shape_expr(groups, trt.int32),
    )


@trtp.impl("trtspec::QuantizeGroups")
def _(x, group: int, outputs, stream):
    _run("QuantizeGroups", (x,), {"group": group}, outputs, stream)


@trtp.register("trtspec::GroupsLinear")
def _(
    x: Desc, values: Desc, x_scales: Desc, x_sums: Desc, panels: Desc, scales: Desc, zeros: Desc, bias: Desc, bits: int
) -> Desc:  # fmt: skip
    """The product of QuantizeGroups' results with weights in groups, + bias [N]: [T, N] in x's dtype."""
    return trtp.from_shape_expr((x.shape_expr[0], bias.shape_expr[0]), x.dtype)


@trtp.impl("trtspec::GroupsLinear")
def _(x, values, x_scales, x_sums, panels, scales, zeros, bias, bits: int, outputs, stream):
    _run("GroupsLinear", (x, values, x_scales, x_sums, panels, scales, zeros, bias), {"bits": bits}, outputs, stream)


@trtp.register("trtspec::KvCompact")
def _(k_cache: Desc, v_cache: Desc, block_tables: Desc, starts: Desc, path: Desc) -> tuple[Desc, Desc]:
    """Caches, which are the old ones, changed."""
    return k_cache.aliased(), v_cache.aliased()


@trtp.impl("trtspec::KvCompact")
def _(k_cache, v_cache, block_tables, starts, path, outputs, stream):
    _run("KvCompact", (k_cache, v_cache, block_tables, starts, path), {}, outputs, stream)
