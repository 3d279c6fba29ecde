"""Torch tensors over the memory that TensorRT passes to a plugin, without copying."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import tensorrt as trt
import torch

DTYPES: dict[trt.DataType, torch.dtype] = {
    trt.float32: torch.float32,
    trt.float16: torch.float16,
    trt.bfloat16: torch.bfloat16,
    trt.int32: torch.int32,
    trt.int64: torch.int64,
    trt.bool: torch.bool,
}
# __cuda_array_interface__ has no bf16, which is passed as int16.
_TYPESTRS = {
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.bool: "|b1",
}


def tensor_over(address: int, dtype: trt.DataType, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor of `shape` and `strides` (in elements) over the memory at `address`.

    The memory belongs to the current GPU if torch has one, else to the host. TensorRT's own pointers are always the
    GPU's; the host's are for tests. The memory must outlive the tensor. TypeError for a dtype that no op takes.
    """
    if dtype not in DTYPES:
        raise TypeError(f"a tensor of {dtype}: the ops take {', '.join(map(str, DTYPES))}")
    element = DTYPES[dtype]
    on_gpu = torch.cuda.is_available()
    if 0 in shape:  # the pointer of an empty tensor may be anything
        return torch.empty(shape, dtype=element, device="cuda" if on_gpu else "cpu")
    if on_gpu:
        interface = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "strides": tuple(stride * element.itemsize for stride in strides),
            "typestr": _TYPESTRS[element],
        }
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda").view(element)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * element.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=element).as_strided(shape, strides)
