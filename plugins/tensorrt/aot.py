"""The plugins' AOT form: a kernel as PTX with its launch parameters, which TensorRT keeps in the engine.

Every plugin has one. `build_scripts/build_plugins.py --target tensorrt` compiles the PTX beforehand, for the GPU that
builds the engine or for $TRTSPEC_CUDA_ARCH (sm_90, say). SpecAttention's is compiled for the model's dtype, head size
and heads per KV head. KvCompact's is compiled for the caches' dtype and the length of the path.

TensorRT launches a kernel with the inputs' pointers, the integers given here, and the outputs' pointers, in that order.
That is from tensorrt.plugin.aot_impl's documentation; integers are 32 bits wide. Tests check that the PTX declares just
these arguments. No test checks that TensorRT launches it, with these grids, as that needs a GPU.

TensorRT reads the annotations as objects: no `from __future__ import annotations`. An aot_impl function must name all
of a plugin's attributes, in order.
"""

from collections.abc import Sequence
from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp
from trtspec_plugins.tensorrt import jit  # noqa: F401  (registers what is completed here)
from trtspec_plugins.tensorrt.build import compiled_for, folder
from trtspec_plugins.tensorrt.device import architecture
from trtspec_plugins.triton.launch import (
    GROUP_BLOCK,
    GROUP_ROWS,
    LOGITS_COLUMNS,
    LOGITS_ROWS,
    LOGITS_STEP,
    aot_rows,
    float_bits,
    path_tile,
)

_SPELLED = {trt.float32: "fp32", trt.float16: "fp16", trt.bfloat16: "bf16"}
Launch = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]


def _launch(kernel: str, programs: Any, integers: Sequence[Any], heads: Any = 1) -> Launch:
    """PTX and launch parameters of a kernel. integers: numbers or expressions of dimensions.

    There is one block of threads per program.
    """
    compiled = compiled_for(kernel, architecture())
    parameters = trtp.KernelLaunchParams()
    parameters.grid_x = programs
    parameters.grid_y = heads
    parameters.block_x = compiled.num_threads
    parameters.shared_mem = compiled.shared_bytes
    arguments = trtp.SymIntExprs(len(integers))
    for index, integer in enumerate(integers):
        arguments[index] = trtp.SymInt32(integer)
    return compiled.entry, (folder() / compiled.file).read_text(encoding="utf-8"), parameters, arguments


@trtp.aot_impl("trtspec::SpecAttention")
def _(
    q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, scale: float, window: int, softcap: float,
    outputs, tactic,
) -> Launch:  # fmt: skip
    return _attention(q, k_cache, block_tables, scale, window, softcap)


@trtp.aot_impl("trtspec::SpecAttentionChained")
def _(
    q, k, v, k_cache, v_cache, cu_q_lens, kv_lens, block_tables, scale: float, window: int, softcap: float,
    outputs, tactic,
) -> Launch:  # fmt: skip
    return _attention(q, k_cache, block_tables, scale, window, softcap)


def _attention(q, k_cache, block_tables, scale: float, window: int, softcap: float) -> Launch:
    T, Hq, D = (q.shape_expr[axis] for axis in range(3))
    num_blocks, block_size, Hkv = (k_cache.shape_expr[axis] for axis in range(3))
    B, columns = block_tables.shape_expr[0], block_tables.shape_expr[1]
    if not (Hq.is_constant and D.is_constant and Hkv.is_constant):
        raise ValueError("SpecAttention wants fixed numbers of heads and a fixed head size in q and k_cache")
    if q.dtype not in _SPELLED or k_cache.dtype != q.dtype:
        raise TypeError(
            f"SpecAttention wants q and caches of one dtype, FLOAT, HALF or BF16: {q.dtype}, {k_cache.dtype}"
        )
    group = Hq.constant_value() // Hkv.constant_value()
    kernel = f"SpecAttention-{_SPELLED[q.dtype]}-d{D.constant_value()}-g{group}"
    # (row, head) pairs of a program; requests begin their own programs
    pairs = aot_rows(D.constant_value(), group, 4 if q.dtype == trt.float32 else 2)
    strides = [Hq * D, Hkv * D, Hkv * D]
    sizes = [T, B, columns, num_blocks, block_size, Hkv, *strides]
    integers = [*sizes, float_bits(scale), window, float_bits(softcap)]
    return _launch(kernel, trtp.cdiv(T * group, pairs) + B, integers, Hkv)


@trtp.aot_impl("trtspec::ProcessLogits")
def _(logits, positions, ban_ids, ban_until, temperatures, top_ks, top_ps, min_ps, outputs, tactic) -> Launch:
    R, V = logits.shape_expr[0], logits.shape_expr[1]
    sizes = [group.shape_expr[0] for group in (ban_ids, temperatures, top_ks, top_ps, min_ps)]
    return _launch("ProcessLogits", R, [V, ban_ids.shape_expr[1], *sizes])


@trtp.aot_impl("trtspec::ProcessLogitsConstrained")
def _(
    logits, positions, history, prompt_lens, penalties, bias_ids, bias_values, ban_ids, ban_until, allow_mask,
    temperatures, top_ks, top_ps, min_ps, outputs, tactic,
) -> Launch:  # fmt: skip
    R, V = logits.shape_expr[0], logits.shape_expr[1]
    widths = [one.shape_expr[1] for one in (history, penalties, bias_ids, ban_ids)]
    sizes = [ban_ids.shape_expr[0], allow_mask.shape_expr[1]]
    sizes += [group.shape_expr[0] for group in (temperatures, top_ks, top_ps, min_ps)]
    return _launch("ProcessLogitsConstrained", R, [V, *widths, *sizes])


@trtp.aot_impl("trtspec::SpecAccept")
def _(sampled, draft_tokens, draft_lens, forced_accept, emits, outputs, tactic) -> Launch:
    B, K = draft_tokens.shape_expr[0], draft_tokens.shape_expr[1]
    return _launch("SpecAccept", B, [K])


@trtp.aot_impl("trtspec::SpecSample")
def _(logits, greedy, seeds, positions, outputs, tactic) -> Launch:
    R, V = logits.shape_expr[0], logits.shape_expr[1]
    return _launch("SpecSample", R, [V, seeds.shape_expr[0]])


@trtp.aot_impl("trtspec::SpecSampleVocab")
def _(logits, greedy, seeds, positions, vocab_ids, outputs, tactic) -> Launch:
    R, V = logits.shape_expr[0], logits.shape_expr[1]
    return _launch("SpecSampleVocab", R, [V, seeds.shape_expr[0]])


@trtp.aot_impl("trtspec::LinearLogits")
def _(x, weight, outputs, tactic) -> Launch:
    R, K, N = x.shape_expr[0], x.shape_expr[1], weight.shape_expr[0]
    if not K.is_constant or K.constant_value() % LOGITS_STEP:
        raise ValueError(f"LinearLogits wants a fixed number of inputs in x that is a multiple of {LOGITS_STEP}")
    if x.dtype not in (trt.float16, trt.bfloat16) or weight.dtype != x.dtype:
        raise TypeError(f"LinearLogits wants x and weight of one dtype, HALF or BF16: {x.dtype}, {weight.dtype}")
    integers = [R, N, K, K, K.constant_value() // LOGITS_STEP]
    kernel = f"LinearLogits-{_SPELLED[x.dtype]}"
    return _launch(kernel, trtp.cdiv(R, LOGITS_ROWS), integers, trtp.cdiv(N, LOGITS_COLUMNS))


@trtp.aot_impl("trtspec::QuantizeGroups")
def _(x, group: int, outputs, tactic) -> Launch:
    T, K = x.shape_expr[0], x.shape_expr[1]
    if not K.is_constant:
        raise ValueError("QuantizeGroups wants a fixed number of inputs in x")
    groups = K.constant_value() // group
    kernel = f"QuantizeGroups-{_spelled('QuantizeGroups', x)}-g{group}"
    return _launch(kernel, T, [groups, K], -(-groups // (GROUP_BLOCK // group)))


@trtp.aot_impl("trtspec::GroupsLinear")
def _(x, values, x_scales, x_sums, panels, scales, zeros, bias, bits: int, outputs, tactic) -> Launch:
    T, K, N, groups = x.shape_expr[0], x.shape_expr[1], bias.shape_expr[0], scales.shape_expr[1]
    if not (K.is_constant and N.is_constant and groups.is_constant):
        raise ValueError("GroupsLinear wants fixed numbers of inputs in x, of outputs in bias, and of groups in scales")
    group = K.constant_value() // groups.constant_value()
    kernel = f"GroupsLinear-{_spelled('GroupsLinear', x)}-w{bits}-g{group}"
    return _launch(kernel, trtp.cdiv(T, GROUP_ROWS), [T, N, K], -(-N.constant_value() // 32))


def _spelled(plugin: str, x) -> str:
    if x.dtype not in _SPELLED:
        raise TypeError(f"{plugin} wants x of FLOAT, HALF or BF16: {x.dtype}")
    return _SPELLED[x.dtype]


@trtp.aot_impl("trtspec::KvCompact")
def _(k_cache, v_cache, block_tables, starts, path, outputs, tactic) -> Launch:
    num_blocks, block_size, Hkv, D = (k_cache.shape_expr[axis] for axis in range(4))
    B, L = path.shape_expr[0], path.shape_expr[1]
    if not (Hkv.is_constant and D.is_constant and L.is_constant):
        raise ValueError("KvCompact wants a fixed number of heads and head size in k_cache, and a fixed length of path")
    if k_cache.dtype not in _SPELLED:
        raise TypeError(f"KvCompact wants caches of FLOAT, HALF or BF16: {k_cache.dtype}")
    width = Hkv.constant_value() * D.constant_value()
    rows, elements = path_tile(L.constant_value())
    integers = [block_tables.shape_expr[1], num_blocks, block_size, width, L]
    return _launch(f"KvCompact-{_SPELLED[k_cache.dtype]}-l{rows}", B, integers, -(-width // elements))
