"""ONNX's operators on the bits of integers as TensorRT layers. TensorRT itself has only arithmetic on integers.

All numbers are int64. An ONNX tensor of uint64 is one of int64 with the same bits: only casts from and to int64 and
shifts take it. Masks must be 2^n - 1. Operands of BitwiseXor must be in 0 .. 2^32 - 1.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from trtspec.backends.tensorrt.writer import Writer
from trtspec.errors import UnsupportedError

_BYTE = 256


def bitwise_and(w: Writer, node: ir.Node) -> list[Any]:
    """Write BitwiseAnd with a mask 2^n - 1: the remainder by 2^n."""
    mask = w.known(node.inputs[1], "mask")
    if len(mask) != 1 or mask[0] < 1 or mask[0] & (mask[0] + 1):
        raise UnsupportedError(
            f"TensorRT: node {w.node!r} has the mask {mask}, which is not 2^n - 1; please report this"
        )
    x = w.get(node.inputs[0])
    return [_split(w, x, mask[0] + 1)[1]]


def bit_shift(w: Writer, node: ir.Node) -> list[Any]:
    """Write BitShift to the right by a constant, of unsigned numbers."""
    [by] = w.known(node.inputs[1], "number of bits")
    if node.attributes["direction"].as_string() != "RIGHT" or not 2 <= by <= 63:
        raise UnsupportedError(f"TensorRT: node {w.node!r} shifts other than right; please report this")
    x = w.get(node.inputs[0])
    rank = len(x.shape)
    shifted = _floor_divide(w, x, 2**by)
    missing = w.number(2 ** (64 - by), x, rank)  # the highest bit counts as -2^63, and stands for 2^63
    negative = w.binary("LESS", x, w.number(0, x, rank))
    return [w.out(w.network.add_select(negative, w.binary("SUM", shifted, missing), shifted))]


def bitwise_xor(w: Writer, node: ir.Node) -> list[Any]:
    """Write BitwiseXor of 32-bit words: byte by byte, through a table of all pairs of bytes."""
    a, b = w.get_all(node.inputs)
    rank = len(a.shape)
    numbers = torch.arange(_BYTE)
    table = w.integers((numbers[:, None] ^ numbers).flatten().tolist())
    total = None
    for place in range(4):
        a, one = _split(w, a, _BYTE) if place < 3 else (a, a)
        b, other = _split(w, b, _BYTE) if place < 3 else (b, b)
        index = w.binary("SUM", w.binary("PROD", one, w.number(_BYTE, one, rank)), other)
        byte = w.gather(table, index)
        if place:
            byte = w.binary("PROD", byte, w.number(_BYTE**place, byte, rank))
        total = byte if total is None else w.binary("SUM", total, byte)
    return [total]


def _split(w: Writer, x: Any, by: int) -> tuple[Any, Any]:
    """Return x divided by a positive number, rounded down, and the remainder."""
    quotient = _floor_divide(w, x, by)
    return quotient, w.binary("SUB", x, w.binary("PROD", quotient, w.number(by, x, len(x.shape))))


def _floor_divide(w: Writer, x: Any, by: int) -> Any:
    return w.binary("FLOOR_DIV", x, w.number(by, x, len(x.shape)))


BITS = {"BitShift": bit_shift, "BitwiseAnd": bitwise_and, "BitwiseXor": bitwise_xor}
"""ONNX op_type -> function that writes the operator."""
