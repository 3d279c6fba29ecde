"""The Triton kernel of each AOT plugin, and how it is compiled. Needs Triton."""

from __future__ import annotations

import math
import re

from trtspec_plugins.triton import accept, attention, compact, constraints, linear, linear_quantized, logits, sample
from trtspec_plugins.triton.compile import Kernel
from trtspec_plugins.triton.launch import (
    AOT_TILE_BYTES,
    GROUP_BLOCK,
    GROUP_ROWS,
    LOGITS_COLUMNS,
    LOGITS_ROWS,
    LOGITS_STEP,
    aot_rows,
    attention_options,
    attention_shape,
    path_tile,
)

_SAMPLE = {"logits": "*fp32", "greedy": "*i1", "seeds": "*i64", "positions": "*i64"}
_SAMPLE_REST = {"V": "i32", "num_seeds": "i32", "tokens": "*i64"}

_GROUPS = {"temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32"}

KERNELS: dict[str, Kernel] = {
    "ProcessLogits": Kernel(
        logits.process_logits_kernel,
        {
            "logits": "*fp32",
            "positions": "*i64",
            "ban_ids": "*i32",
            "ban_until": "*i64",
            **_GROUPS,
            **dict.fromkeys(("V", "M", "num_bans", *(f"num_{group}" for group in _GROUPS)), "i32"),
            "out": "*fp32",
        },
        {"LANES": logits.LANES},
        logits.LANES // 32,
    ),
    "ProcessLogitsConstrained": Kernel(
        constraints.process_constrained_logits_kernel,
        {
            "logits": "*fp32",
            "positions": "*i64",
            "history": "*i32",
            "prompt_lens": "*i64",
            "penalties": "*fp32",
            "bias_ids": "*i32",
            "bias_values": "*fp32",
            "ban_ids": "*i32",
            "ban_until": "*i64",
            "allow_mask": "*i32",
            **_GROUPS,
            **dict.fromkeys(("V", "L", "kinds", "N", "M", "num_bans", "words"), "i32"),
            **dict.fromkeys((f"num_{group}" for group in _GROUPS), "i32"),
            "out": "*fp32",
        },
        {"LANES": logits.LANES},
        logits.LANES // 32,
    ),
    "SpecAccept": Kernel(
        accept.spec_accept_kernel,
        {
            "sampled": "*i64",
            "draft_tokens": "*i64",
            "draft_lens": "*i32",
            "forced_accept": "*i32",
            "emits": "*i1",
            "K": "i32",
            "tokens": "*i64",
            "num_tokens": "*i64",
        },
        {"BLOCK": accept.BLOCK},
        accept.NUM_WARPS,
    ),
    "SpecSample": Kernel(
        sample.spec_sample_dense_kernel,
        {**_SAMPLE, **_SAMPLE_REST},
        {"OWN_IDS": False, "BLOCK": sample.BLOCK},
        sample.NUM_WARPS,
    ),
    "SpecSampleVocab": Kernel(
        sample.spec_sample_kernel,
        {**_SAMPLE, "vocab_ids": "*i64", **_SAMPLE_REST},
        {"OWN_IDS": True, "BLOCK": sample.BLOCK},
        sample.NUM_WARPS,
    ),
}
"""Kernel name -> kernel, for the plugins with one kernel for every model. A kernel has the name of its plugin."""

_ATTENTION = re.compile(r"SpecAttention-(bf16|fp16|fp32)-d(\d+)-g(\d+)")
_COMPACT = re.compile(r"KvCompact-(bf16|fp16|fp32)-l(\d+)")
_QUANTIZE = re.compile(r"QuantizeGroups-(bf16|fp16|fp32)-g(32|64|128)")
_IN_GROUPS = re.compile(r"GroupsLinear-(bf16|fp16|fp32)-w([48])-g(32|64|128)")
_LINEAR = re.compile(r"LinearLogits-(bf16|fp16)")
_LINEAR_ABSENT = ("scales", "x_scales", "bias", "partials", "counters")
_LINEAR_INTEGERS = ("T", "N", "K", "x_stride", "piece_steps")
_CACHES = ("k_cache", "v_cache")
_ATTENTION_INTEGERS = (
    "T", "B", "columns", "num_blocks", "block_size", "Hkv", "q_stride", "k_stride", "v_stride",
    "scale_bits", "window", "softcap_bits",
)  # fmt: skip
_ATTENTION_ABSENT = (
    "tree_mask", "sinks", "tree_base", "ancestors", "words", "entries", "chunks", "tops", "totals", "partials",
)  # fmt: skip
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_COMPACT_INTEGERS = ("columns", "num_blocks", "block_size", "width", "L")


def kernel(name: str) -> Kernel:
    """The kernel of that name. LookupError for an unknown name.

    Kernels that are compiled for certain shapes have these in their names. SpecAttention-bf16-d128-g4 has the dtype
    (bf16, fp16, fp32), the head size and the number of query heads per KV head. KvCompact-bf16-l8 has the dtype and the
    length of the path, rounded up to a power of two and at least 8. LinearLogits-bf16 has the dtype.
    QuantizeGroups-bf16-g128 has the inputs of a group, too, and GroupsLinear-bf16-w4-g128 the bits of a weight.
    """
    if name in KERNELS:
        return KERNELS[name]
    if shape := _ATTENTION.fullmatch(name):
        return _attention(shape[1], int(shape[2]), int(shape[3]))
    if (shape := _COMPACT.fullmatch(name)) and path_tile(int(shape[2]))[0] == int(shape[2]):
        return _compact(shape[1], int(shape[2]))
    if shape := _LINEAR.fullmatch(name):
        return _logits(shape[1])
    if shape := _QUANTIZE.fullmatch(name):
        return _quantize(shape[1], int(shape[2]))
    if shape := _IN_GROUPS.fullmatch(name):
        return _in_groups(shape[1], int(shape[2]), int(shape[3]))
    likes = "SpecAttention-bf16-d128-g4, KvCompact-bf16-l8, LinearLogits-bf16, QuantizeGroups-bf16-g128"
    raise LookupError(f"{name}: there are {', '.join(KERNELS)}, {likes} and GroupsLinear-bf16-w4-g128 with their likes")


def _attention(dtype: str, head_dim: int, group: int) -> Kernel:
    floats = dict.fromkeys(("q", "k", "v", *_CACHES), f"*{dtype}")
    metadata = dict.fromkeys(("cu_q_lens", "kv_lens", "block_tables"), "*i32")
    outputs = dict.fromkeys(("out", *(f"new_{cache}" for cache in _CACHES)), f"*{dtype}")
    size = _BYTES[dtype]
    shape = attention_shape(head_dim, group, aot_rows(head_dim, group, size), size, AOT_TILE_BYTES)
    align = math.gcd(16, head_dim * size)  # TensorRT's tensors begin at multiples of 256 bytes
    constants = {**dict.fromkeys(_ATTENTION_ABSENT), **shape, "CHUNK": attention.CHUNK, "ALIGN": align, "ENTRIES": 1}
    signature = {**floats, **metadata, **dict.fromkeys(_ATTENTION_INTEGERS, "i32"), **outputs}
    options = attention_options(shape, split=False, element_bytes=size)
    return Kernel(attention.spec_attention_kernel, signature, constants, options.pop("num_warps"), options)


def _logits(dtype: str) -> Kernel:
    """All inputs in one piece: its sums are those of linear.py's launches for matrices of so many columns."""
    pointers = dict.fromkeys(("x", "weight"), f"*{dtype}")
    signature = {**pointers, **dict.fromkeys(_LINEAR_INTEGERS, "i32"), "out": "*fp32"}
    flags = {"X_SCALE": False, "BIAS": False, "SPLIT": False, "EVEN": True}
    sizes = {"BLOCK_M": LOGITS_ROWS, "BLOCK_N": LOGITS_COLUMNS, "BLOCK_K": LOGITS_STEP}
    constants = {**dict.fromkeys(_LINEAR_ABSENT), "LAYOUT": linear.PLAIN.value, **flags, **sizes}
    options = dict(linear.FEW)
    warps = options.pop("num_warps")
    aligned = ("x", "weight", "K", "x_stride", "out")
    kernel = linear.few_rows_kernel
    return Kernel(kernel, signature, constants, warps, {**options, "enable_fp_fusion": False}, aligned)


def _quantize(dtype: str, group: int) -> Kernel:
    outputs = {"values": "*i8", "x_scales": "*fp32", "x_sums": "*i32"}
    signature = {"x": f"*{dtype}", "groups": "i32", "x_stride": "i32", **outputs}
    constants = {"GROUP": group, "BLOCK": GROUP_BLOCK}
    return Kernel(linear_quantized.quantize_groups_kernel, signature, constants, aligned=("x", "x_stride", *outputs))


def _in_groups(dtype: str, bits: int, group: int) -> Kernel:
    signature = {
        "x": f"*{dtype}",
        "values": "*i8",
        "x_scales": "*fp32",
        "x_sums": "*i32",
        "panels": "*u8" if bits == 4 else "*i8",
        "scales": "*fp16",
        "zeros": "*u8",
        "bias": f"*{dtype}",
        **dict.fromkeys(("T", "N", "K"), "i32"),
        "out": f"*{dtype}",
    }
    constants = {
        "PER_WORD": 32 // bits,
        "ZEROS": bits == 4,
        "BLOCK_M": GROUP_ROWS,
        "GROUP": group,
        "CHUNK": linear_quantized.GROUP_CHUNK // group,
    }
    options = {"enable_fp_fusion": False, "num_stages": linear_quantized.GROUP_STAGES}
    aligned = tuple(name for name in signature if name not in ("T", "N"))
    return Kernel(linear_quantized.groups_plugin_kernel, signature, constants, options=options, aligned=aligned)


def _compact(dtype: str, length: int) -> Kernel:
    caches = dict.fromkeys(_CACHES, f"*{dtype}")
    metadata = {"block_tables": "*i32", "starts": "*i32", "path": "*i64"}
    outputs = dict.fromkeys((f"new_{cache}" for cache in _CACHES), f"*{dtype}")
    signature = {**caches, **metadata, **dict.fromkeys(_COMPACT_INTEGERS, "i32"), **outputs}
    rows, elements = path_tile(length)
    return Kernel(compact.kv_compact_kernel, signature, {"ROWS": rows, "ELEMENTS": elements}, compact.NUM_WARPS)
