"""Launch arithmetic that does not need Triton: PTX that was compiled elsewhere is enough to build an engine."""

from __future__ import annotations

import struct
from typing import Any

GENERATION_ROWS = 4  # of a request, with 3 drafts: attention compiled for all steps suits these best
TILE_BYTES = 16384  # of keys, and of values, in a tile: a program of attention has two tiles in flight
FP32_TILE_BYTES = 8192  # fp32 products, which are no mma.sync, hold both matrices in registers
AOT_TILE_BYTES = 8192  # of kernels in a TensorRT plan, whose launcher is not known to grant more than 48 KB
SPLIT_BELOW = 512  # programs; fewer leave many of a GPU's 108 to 188 SMs idle, or wait for the longest request
MOST_SCRATCH = 256 << 20  # bytes
CHUNK = 256  # keys of each of the first chunks; a multiple of every tile
LEAST_PATH_ROWS = 8  # so that few kernels serve all short paths
GROUP_ROWS, GROUP_BLOCK = 16, 1024  # rows of a program of weights in groups; inputs of a program that rounds them
LOGITS_ROWS, LOGITS_COLUMNS, LOGITS_STEP = 16, 64, 64  # of a program of TensorRT's logits; the last: inputs of a step
PATH_TILE = 2048  # elements of each cache that a program of compaction holds at a time: 16 for each thread


def left_rows(pairs: int) -> int:
    """Number of rows of attention's left matrix: 16 or 32.

    16 is the least that a matrix product of the GPU takes, and 32 the most that gives the same bits.
    pairs: number of (row, query head) pairs of one KV head that a request has.
    """
    return 16 if pairs <= 16 else 32


def aot_rows(head_dim: int, group: int, element_bytes: int) -> int:
    """Number of rows of attention's left matrix in a TensorRT plan: wide heads leave shared memory for 16 alone."""
    return 16 if _padded(head_dim) * element_bytes >= 512 else left_rows(GENERATION_ROWS * group)


def attention_shape(
    head_dim: int, group: int, rows: int, element_bytes: int, most_bytes: int = TILE_BYTES
) -> dict[str, int]:
    """Sizes for which attention is compiled. most_bytes: of keys in a tile.

    A row's bits follow from TILE, the number of keys that a program takes at a time. So TILE depends on the model
    alone, and on whether the kernel is for a TensorRT plan.
    """
    padded = _padded(head_dim)
    tile_bytes = min(most_bytes, FP32_TILE_BYTES if element_bytes == 4 else TILE_BYTES)
    tile = min(64, max(16, tile_bytes // (padded * element_bytes)))
    return {"D": head_dim, "D_PADDED": padded, "GROUP": group, "BLOCK_M": rows, "TILE": tile}


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def attention_options(shape: dict[str, int], split: bool, element_bytes: int) -> dict[str, Any]:
    """Options with which attention of that shape is compiled.

    The register limit is the highest possible. Without it, the assembler spills a few registers in most of these
    kernels, to have room for one more program on an SM.
    """
    wide = shape["BLOCK_M"] * shape["D_PADDED"] * element_bytes > 4096
    options = {"num_warps": 8 if wide else 4, "enable_fp_fusion": False}
    return options if split and shape["BLOCK_M"] == 16 else {**options, "maxnreg": 255}


def most_scratch(length: int, head_dim: int) -> int:
    """Upper bound of the bytes of scratch memory that attention over `length` tokens takes, whatever its rows."""
    chunks = -(-length // CHUNK)
    return min(MOST_SCRATCH, 32 * SPLIT_BELOW * chunks * (head_dim + 2) * 4) if chunks > 1 else 0


def path_tile(length: int) -> tuple[int, int]:
    """(rows, elements of each) that a program of compaction moves: powers of two; rows suit a path of this length."""
    rows = max(LEAST_PATH_ROWS, 1 << (length - 1).bit_length())
    return rows, max(16, PATH_TILE // rows)


def float_bits(value: float) -> int:
    """An fp32 number as an int32: kernels in an engine take only integers."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
