"""packed_linear: x [T, K] @ W^T, with the same bits for a row of x whatever the other rows and their number.

K is cut into pieces, whose number and position follow from N and K alone (`pieces`). A piece is summed from zero, in
steps of BLOCK_K inputs; pieces are added in order.
For few rows, the time goes into reading the weights. A program then has a tile of columns and one piece, so that all of
the GPU reads. The last program of a tile to finish adds the tile's pieces. For many rows, the time goes into
arithmetic. A program then goes through all pieces of its tile.

Both forms multiply with mma.sync. On sm_90 and sm_100 Triton would use wgmma and tcgen05 for left matrices of 64 rows
or more, and nothing guarantees that these add in the same order. So a product has at most 32 rows, and a program of
many rows multiplies four such products. tests/plugins/test_triton_linear.py checks the instructions of the compiled
kernels.

int8 sums are integers, so their order does not matter. They are cut in the same manner.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from trtspec_plugins.triton.linear_quantized import E4M3_UNIT, e4m3_to_fp16, groups_linear, quantize_rows, round_rows

from trtspec.ops.packing import GROUP_SIZES, PANEL

PLAIN, INT8, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

BLOCK_BYTES = 128  # bytes of a row of weights (fp8 with fp32 x: of x) in a step: a cache line
COLUMNS = 64  # columns of a program of few rows
PROGRAMS = 264  # wanted for few rows: two for each of the 132 multiprocessors of an H200
LEAST_STEPS = 4  # steps of a piece: shorter pieces cost more to add than to sum
MANY_ROWS = 64  # up to this number of rows, reading weights takes the time
MANY_PROGRAMS = 66  # least number for which the kernel of many rows is worth it: half the multiprocessors
COUNTERS = 4096  # at least the number of tiles of few rows in one launch: many columns come with fewer rows

FEW = {"num_warps": 4, "num_stages": 5}
NARROW_ROWS = 256  # up to this number of rows, programs of many rows have 64 columns, so that there are more of them


@triton.jit
def _weights(weight, n, k, N, K, LAYOUT: tl.constexpr, EVEN: tl.constexpr, dtype: tl.constexpr):
    """W^T [BLOCK_K, BLOCK_N] in `dtype` (integers as they are) of inputs k and columns n, both consecutive numbers.

    Past K there are zeros; past N there may be anything.
    """
    if LAYOUT == PLAIN:
        place = tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
        if EVEN:
            return tl.load(weight + place)
        return tl.load(weight + place, mask=(k < K)[:, None], other=0.0)
    # A word is four inputs of a column, and 32 columns are adjacent: load whole lines, then sort them.
    BLOCK_K: tl.constexpr = k.shape[0]
    BLOCK_N: tl.constexpr = n.shape[0]
    steps = tl.cdiv(K, 4)
    octet = tl.arange(0, 4 * BLOCK_N)
    panel = tl.minimum(tl.min(n, axis=0) // 32 + octet // 128, tl.cdiv(N, 32) - 1)
    step = tl.min(k, axis=0) // 4 + tl.arange(0, BLOCK_K // 4)
    place = (panel.to(tl.int64) * steps)[None, :] * 128 + (step[:, None] * 128 + (octet % 128)[None, :])
    words = tl.load(weight + place) if EVEN else tl.load(weight + place, mask=(step < steps)[:, None], other=0)
    words = tl.permute(tl.reshape(words, (BLOCK_K // 4, BLOCK_N, 4)), (0, 2, 1))
    values = tl.reshape(words, (BLOCK_K, BLOCK_N))
    if LAYOUT == INT8:
        return values
    return e4m3_to_fp16(values).to(dtype)


@triton.jit
def _rows(x, row, k, T, K, x_stride, EVEN: tl.constexpr):
    """x [BLOCK_M, BLOCK_K]. Past K there are zeros; past T the last row repeats."""
    place = tl.minimum(row, T - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    if EVEN:
        return tl.load(x + place)
    return tl.load(x + place, mask=(k < K)[None, :], other=0)


@triton.jit
def _write(
    sums, row, n, scales, x_scales, bias, T, N, out, LAYOUT: tl.constexpr, X_SCALE: tl.constexpr, BIAS: tl.constexpr
):
    """Store out[row, n] = sums [BLOCK_M, BLOCK_N] scaled, + bias, rounded once.

    The operations are the reference's, in its order.
    """
    result = sums.to(tl.float32)
    if LAYOUT != PLAIN:
        scale = tl.load(scales + n, mask=n < N, other=0.0)[None, :]
        if LAYOUT == INT8:
            result = result * (tl.load(x_scales + row, mask=row < T, other=0.0)[:, None] * scale)
        else:
            if X_SCALE:
                scale = scale * tl.load(x_scales)
            result = (result * E4M3_UNIT) * scale
    if BIAS:
        result = result + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (row < T)[:, None] & (n < N)[None, :]
    place = row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def few_rows_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K], or panels
    scales,  # [P, 32] fp32, or anything where the weight is plain
    x_scales,  # int8: [T] fp32; fp8 with X_SCALE: [1] fp32; anything otherwise
    bias,  # [N], or anything where not BIAS
    T,
    N,
    K,
    x_stride,
    piece_steps,  # number of steps of a piece
    partials,  # [tiles, pieces, BLOCK_M, BLOCK_N] fp32 or int32, or anything where not SPLIT
    counters,  # [row tiles * column tiles] int32, zeros before and after
    out,  # [T, N]
    LAYOUT: tl.constexpr,
    X_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile of rows with a tile of columns over one piece, in one program.

    Programs of neighbouring tiles of rows start together, so that all but one of them find the weights in the cache.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    piece = tl.program_id(2)
    kind: tl.constexpr = tl.int32 if LAYOUT == INT8 else tl.float32
    sums = tl.zeros((BLOCK_M, BLOCK_N), kind)
    for step in range(piece * piece_steps, tl.minimum((piece + 1) * piece_steps, tl.cdiv(K, BLOCK_K))):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        rows = _rows(x, row, k, T, K, x_stride, EVEN)
        columns = _weights(weight, n, k, N, K, LAYOUT, EVEN, x.dtype.element_ty)
        sums = tl.dot(rows, columns, sums, input_precision="ieee", out_dtype=kind)
    if SPLIT:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        pieces = tl.num_programs(2)
        # A piece of a tile is contiguous, so that threads move 16 bytes at a time. Only rows that exist are moved.
        place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        own = partials + tile.to(tl.int64) * pieces * (BLOCK_M * BLOCK_N)
        tl.store(own + piece * (BLOCK_M * BLOCK_N) + place, sums, mask=(row < T)[:, None])
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == pieces - 1:
            tl.store(counters + tile, 0)  # for the next launch
            total = tl.zeros((BLOCK_M, BLOCK_N), kind)
            at_once: tl.constexpr = 128 // BLOCK_M  # pieces to load at once, as each load takes long
            for first in range(0, pieces, at_once):
                for i in tl.static_range(at_once):
                    there = (row < tl.where(first + i < pieces, T, 0))[:, None]
                    other = own + (first + i) * (BLOCK_M * BLOCK_N) + place
                    # .cg bypasses the multiprocessor's own cache. Pieces that do not exist add zeros: no sum changes.
                    total += tl.load(other, mask=there, other=0, cache_modifier=".cg")
            _write(total, row, n, scales, x_scales, bias, T, N, out, LAYOUT, X_SCALE, BIAS)
    else:
        _write(sums, row, n, scales, x_scales, bias, T, N, out, LAYOUT, X_SCALE, BIAS)


@triton.jit
def many_rows_kernel(
    x,  # all arguments as in few_rows_kernel
    weight,
    scales,
    x_scales,
    bias,
    T,
    N,
    K,
    x_stride,
    piece_steps,
    out,
    LAYOUT: tl.constexpr,
    X_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a product; a program has four products
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile of 4 * BLOCK_M rows with a tile of columns, in one program, which adds the pieces as it goes."""
    row0 = tl.program_id(0) * (4 * BLOCK_M) + tl.arange(0, BLOCK_M)
    row1, row2, row3 = row0 + BLOCK_M, row0 + 2 * BLOCK_M, row0 + 3 * BLOCK_M
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    kind: tl.constexpr = tl.int32 if LAYOUT == INT8 else tl.float32
    zeros = tl.zeros((BLOCK_M, BLOCK_N), kind)
    sums0, sums1, sums2, sums3 = zeros, zeros, zeros, zeros
    total0, total1, total2, total3 = zeros, zeros, zeros, zeros
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        columns = _weights(weight, n, k, N, K, LAYOUT, EVEN, x.dtype.element_ty)
        x0 = _rows(x, row0, k, T, K, x_stride, EVEN)
        x1 = _rows(x, row1, k, T, K, x_stride, EVEN)
        x2 = _rows(x, row2, k, T, K, x_stride, EVEN)
        x3 = _rows(x, row3, k, T, K, x_stride, EVEN)
        sums0 = tl.dot(x0, columns, sums0, input_precision="ieee", out_dtype=kind)
        sums1 = tl.dot(x1, columns, sums1, input_precision="ieee", out_dtype=kind)
        sums2 = tl.dot(x2, columns, sums2, input_precision="ieee", out_dtype=kind)
        sums3 = tl.dot(x3, columns, sums3, input_precision="ieee", out_dtype=kind)
        if SPLIT:  # noqa: SIM102 (known when it is compiled)
            if (step + 1) % piece_steps == 0:
                total0, total1, total2, total3 = total0 + sums0, total1 + sums1, total2 + sums2, total3 + sums3
                sums0, sums1, sums2, sums3 = zeros, zeros, zeros, zeros
    if SPLIT:  # add the last piece, which may be shorter; zeros, if it is added already, change no sum
        sums0, sums1, sums2, sums3 = total0 + sums0, total1 + sums1, total2 + sums2, total3 + sums3
    _write(sums0, row0, n, scales, x_scales, bias, T, N, out, LAYOUT, X_SCALE, BIAS)
    _write(sums1, row1, n, scales, x_scales, bias, T, N, out, LAYOUT, X_SCALE, BIAS)
    _write(sums2, row2, n, scales, x_scales, bias, T, N, out, LAYOUT, X_SCALE, BIAS)
    _write(sums3, row3, n, scales, x_scales, bias, T, N, out, LAYOUT, X_SCALE, BIAS)


def pieces(N: int, K: int, block_k: int) -> int:
    """Number of steps of block_k inputs in a piece of K. It depends on N and K alone: a row's bits follow from it."""
    steps = triton.cdiv(K, block_k)
    count = max(1, min(PROGRAMS // triton.cdiv(N, COLUMNS), steps // LEAST_STEPS))
    return triton.cdiv(steps, count)


def tiling(T: int, N: int, dtype: torch.dtype) -> tuple[bool, int, int]:
    """(whether the kernel of many rows is used, rows and columns of a program)."""
    rows, columns = (64, 64) if dtype == torch.float32 else (128, 64 if T <= NARROW_ROWS else 128)
    if T > MANY_ROWS and triton.cdiv(T, rows) * triton.cdiv(N, columns) >= MANY_PROGRAMS:
        return True, rows, columns
    return False, 16 if T <= 16 or dtype == torch.float32 else 32, COLUMNS


def many_options(dtype: torch.dtype, layout: int, columns: int, split: bool) -> dict[str, int]:
    """Options of the kernel of many rows.

    Of those tried on an H100 with matrices of 8B parameters, these were the fastest that keep all sums in registers.
    """
    if dtype == torch.float32:  # fp8, which becomes fp32 in registers, leaves no room there for later steps
        return {"num_warps": 4, "num_stages": 1 if layout == FP8.value else 3}
    if columns == 64:
        return {"num_warps": 4, "num_stages": 3 if layout == FP8.value else 4}
    return {"num_warps": 8 if split or layout == FP8.value else 4, "num_stages": 3}


@functools.cache
def _counters(device: torch.device, stream: int) -> Tensor:
    """Counters of a stream: zeros, which each launch leaves as zeros. Launches of one stream never overlap."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("packed_linear: run it once on this stream before a CUDA graph captures it")
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _launch(
    x: Tensor, weight: Tensor, scales: Tensor, x_scales: Tensor | None, bias: Tensor | None, out: Tensor, layout: int
) -> None:
    """Multiply x [T, K], as the layout wants it, with weight [N, K] or panels (fp8: as bytes), into out [T, N]."""
    (T, K), N = x.shape, out.shape[1]
    # With as many inputs of fp32 as a line has fp8, a step would need more registers and shared memory than there are.
    block_k = BLOCK_BYTES // (4 if x.dtype == torch.float32 else weight.element_size())
    piece_steps = pieces(N, K, block_k)
    count = triton.cdiv(triton.cdiv(K, block_k), piece_steps)
    nothing = x  # stands for a pointer that the kernel does not use
    arguments = (
        x, weight, scales, nothing if x_scales is None else x_scales, nothing if bias is None else bias,
        T, N, K, x.stride(0), piece_steps,
    )  # fmt: skip
    constants = {
        "LAYOUT": layout,
        "X_SCALE": x_scales is not None,
        "BIAS": bias is not None,
        "SPLIT": count > 1,
        "EVEN": K % block_k == 0,
        "BLOCK_K": block_k,
        "enable_fp_fusion": False,
    }
    many, rows, columns = tiling(T, N, x.dtype)
    tiles = triton.cdiv(T, rows), triton.cdiv(N, columns)
    if many:
        options = many_options(x.dtype, layout, columns, count > 1)
        many_rows_kernel[tiles](*arguments, out, BLOCK_M=rows // 4, BLOCK_N=columns, **constants, **options)
        return
    partials = counters = nothing
    if count > 1:
        kind = torch.int32 if layout == INT8.value else torch.float32
        partials = x.new_empty(tiles[0] * tiles[1], count, rows, columns, dtype=kind)
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        counters = _counters(x.device, stream)
    few_rows_kernel[(*tiles, count)](
        *arguments, partials, counters, out, BLOCK_M=rows, BLOCK_N=columns, **constants, **FEW
    )


def _check(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, x_scale: Tensor | None, N: int
) -> None:
    """Raise ValueError for tensors that the kernels would read past."""
    K = x.shape[1]
    P, groups = triton.cdiv(N, PANEL), scales.shape[1] if scales.ndim == 3 else 0
    dtypes = {2: {x.dtype}, 4: {torch.int8, torch.uint8, torch.float8_e4m3fn}}.get(weight.ndim, set())
    if weight.dtype not in dtypes:
        raise ValueError(
            f"packed_linear: weight is {weight.dtype} {tuple(weight.shape)}, x {x.dtype}; on a GPU want [N, K] of x's "
            "dtype (panels of floats are the CPU's) or panels of int8, int4 or fp8"
        )
    shapes: dict[str, tuple[Tensor | None, list[tuple[int, ...]], torch.dtype]]
    if weight.ndim == 2:
        shapes = {"weight": (weight, [(N, K)], x.dtype)}
    elif weight.dtype == torch.uint8 or (weight.dtype == torch.int8 and groups):
        fits = groups > 0 and K % groups == 0 and K // groups in GROUP_SIZES
        int4 = weight.dtype == torch.uint8
        shapes = {
            "weight": (weight, [(P, K // (8 if int4 else 4), PANEL, 4)], weight.dtype),
            "scales": (scales, [(P, groups, PANEL)] if fits else [], torch.float16),
            "zeros": (zeros if zeros.numel() else None, [(P, groups, PANEL)] if int4 else [(0,)], torch.uint8),
        }
    else:
        shapes = {
            "weight": (weight, [(P, triton.cdiv(K, 4), PANEL, 4)], weight.dtype),
            "scales": (scales, [(P, PANEL)], torch.float32),
        }
    shapes["bias"] = (bias, [(N,)], x.dtype)
    shapes["x_scale"] = (x_scale, [(0,), (1,)] if weight.dtype == torch.float8_e4m3fn else [(0,)], torch.float32)
    for name, (tensor, wanted, dtype) in shapes.items():
        if tensor is None or (tensor.numel() == 0 and (0,) in wanted):
            continue
        if tensor.shape not in wanted or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"packed_linear: {name} is {tensor.dtype} {tuple(tensor.shape)}; with x {x.dtype} {tuple(x.shape)}, "
                f"weight {weight.dtype} {tuple(weight.shape)} and {N} outputs want contiguous {dtype} {wanted}"
            )


def packed_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_features: int,
    float_out: bool,
) -> Tensor:
    """The op of trtspec/ops/linear.py: [T, out_features]. Float weights are [N, K] here; float panels are the CPU's."""
    _check(x, weight, scales, zeros, bias, x_scale, out_features)
    T = x.shape[0]
    out = x.new_empty(T, out_features, dtype=torch.float32 if float_out else x.dtype)
    if T == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    if weight.ndim == 2:
        _launch(x, weight, scales, None, bias, out, PLAIN.value)
    elif weight.dtype == torch.uint8 or scales.ndim == 3:
        groups_linear(x, weight, scales, zeros, bias, out)
    elif weight.dtype == torch.int8:
        values, x_scales = quantize_rows(x)
        _launch(values, weight, scales, x_scales, bias, out, INT8.value)
    else:
        given = x_scale is not None and x_scale.numel() > 0
        rows = round_rows(x, x_scale) if given else x
        _launch(rows, weight.view(torch.uint8), scales, x_scale if given else None, bias, out, FP8.value)
    return out
