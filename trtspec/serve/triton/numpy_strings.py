"""Repair of the python backend's strings under numpy 2, in servers that were compiled for numpy 1.

Such a server (tritonserver 2.51, whose pybind11 is older than 2.12) reads a descriptor's item size where numpy 1 had it
(offset 32, an int). In numpy 2, the low half of the descriptor's flags is at this offset. It is 0 for numbers, with two
effects:

- Arrays that the server makes of inputs get strides of 0, and repeat their first element. Reading strings fails, which
  ends the server's process.
- Arrays that models make have 0 bytes for the server, so outputs arrive empty, without an error.

Numbers pass by DLPack, which has no strings. For strings, this module changes the part of numpy that such a pybind11
sees. Nothing changes for other code: numpy 2 keeps `numpy.core.multiarray._ARRAY_API` only for such a pybind11, and
newer versions look elsewhere.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NEW_FROM_DESCR = 94  # index of PyArray_NewFromDescr in numpy's table of C functions
_TABLE_LENGTH = 300  # pybind11 looks up indices up to 282; the table is longer
_ITEM_SIZE_OFFSET = 32  # in numpy 1's PyArray_Descr
_POINTER = ctypes.c_void_p
# (type, descr, ndim, dims, strides, data, flags, object) -> array
_NewFromDescr = ctypes.PYFUNCTYPE(
    _POINTER, _POINTER, _POINTER, ctypes.c_int, _POINTER, _POINTER, _POINTER, ctypes.c_int, _POINTER
)
_kept: list[Any] = []  # objects to which C code holds pointers


def repair(pb: Any) -> None:
    """Repair strings; call this when a model is initialised, before the server makes its first array.

    It does nothing under numpy 1. pb: triton_python_backend_utils, whose function that turns strings into bytes is
    replaced.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0" or _kept:
        return
    _repair_inputs()
    pb.serialize_byte_tensor = serialize_byte_tensor


def serialize_byte_tensor(strings: NDArray[np.object_]) -> NDArray[np.uint8]:
    """One array of all strings (bytes), each after its length in four bytes.

    The array has a dtype of its own: numpy's uint8, but with 1 where numpy 1 had the item size. In numpy 2, this 1 is a
    flag of arrays of references. numpy reads the flag when it frees an array's memory, and this array has no memory of
    its own.
    """
    dtype = np.dtype(np.uint8, copy=True)
    array = np.frombuffer(b"".join(struct.pack("<I", len(text)) + text for text in strings.ravel()), dtype)
    ctypes.c_int32.from_address(id(array.dtype) + _ITEM_SIZE_OFFSET).value = dtype.itemsize
    return array


def _repair_inputs() -> None:
    """Make the server's arrays with the strides that numpy computes; all arrays that it asks for are contiguous."""
    import numpy.core.multiarray as kept_for_pybind11

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = _POINTER, [ctypes.py_object, ctypes.c_char_p]
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [_POINTER, ctypes.c_char_p, _POINTER]

    table = (_POINTER * _TABLE_LENGTH).from_address(pointer(kept_for_pybind11._ARRAY_API, None))
    original = _NewFromDescr(table[_NEW_FROM_DESCR] or 0)

    def new_from_descr(kind: int, descr: int, ndim: int, dims: int, strides: int, *others: int) -> int:
        return int(original(kind, descr, ndim, dims, None, *others))

    callback = _NewFromDescr(new_from_descr)
    repaired = (_POINTER * _TABLE_LENGTH)(*table)
    repaired[_NEW_FROM_DESCR] = ctypes.cast(callback, _POINTER).value
    _kept.extend((callback, repaired))
    kept_for_pybind11._ARRAY_API = capsule(ctypes.addressof(repaired), None, None)
