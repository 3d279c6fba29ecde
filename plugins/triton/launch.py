"""Arithmetic of launches that needs no Triton: PTX that was compiled elsewhere is enough to build an engine."""

from __future__ import annotations

import struct

LEAST_LEFT_ROWS = 16  # what a matrix product of the GPU takes
LEAST_PATH_ROWS = 8  # so that few kernels serve all short paths
PATH_TILE = 2048  # elements of each cache that a program of compaction holds at a time: 16 a thread


def left_rows(group: int) -> int:
    """Rows of attention's left matrix: a power of two, 16 at least, that holds the query heads of a row."""
    return max(LEAST_LEFT_ROWS, 1 << (group - 1).bit_length())


def path_tile(length: int) -> tuple[int, int]:
    """(rows, elements of each) that a program of compaction moves: powers of two, rows for a path of this length."""
    rows = max(LEAST_PATH_ROWS, 1 << (length - 1).bit_length())
    return rows, max(16, PATH_TILE // rows)


def float_bits(value: float) -> int:
    """An fp32 number as an int32: kernels in an engine take integers alone."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
