"""Arrays for servers that were compiled for numpy 1, read as such a server reads them."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from trtspec.serve.triton.numpy_strings import serialize_byte_tensor

pytestmark = pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="numpy 1 needs none of it")

TEXTS = np.array([b"one", b"", "zwölf".encode()], dtype=np.object_)


def test_strings_have_a_size_where_numpy_1_had_it() -> None:
    array = serialize_byte_tensor(TEXTS)
    assert ctypes.c_int32.from_address(id(array.dtype) + 32).value == 1
    assert bytes(memoryview(array)) == b"\x03\0\0\0one\0\0\0\0\x06\0\0\0zw\xc3\xb6lf"
    assert np.dtype(np.uint8).flags == np.arange(3, dtype=np.uint8).dtype.flags == 0, "numpy's own is untouched"


def test_such_arrays_come_and_go() -> None:
    before = sys.getrefcount(None)
    for _ in range(2000):
        serialize_byte_tensor(TEXTS)
    assert abs(sys.getrefcount(None) - before) < 100


CALL_AS_OLD_PYBIND11 = """
import ctypes, types, numpy as np
import numpy.core.multiarray as old
from trtspec.serve.triton import numpy_strings as t

pb = types.SimpleNamespace()
t.repair(pb)
t.repair(pb)  # of a second model of the process
assert pb.serialize_byte_tensor is t.serialize_byte_tensor
get = ctypes.pythonapi.PyCapsule_GetPointer
table = (ctypes.c_void_p * 300).from_address(get(old._ARRAY_API, None))
data = (ctypes.c_uint8 * 6)(1, 2, 3, 4, 5, 6)
dims, strides = (ctypes.c_ssize_t * 1)(6), (ctypes.c_ssize_t * 1)(0)
new = ctypes.PYFUNCTYPE(ctypes.py_object, *[ctypes.c_void_p] * 2, ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_int,
                        ctypes.c_void_p)(table[94])
dtype = np.dtype(np.uint8)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(dtype))  # the call takes this reference
address = ctypes.addressof
array = new(id(np.ndarray), id(dtype), 1, address(dims), address(strides), address(data), 0, None)
print(array.tolist(), array.strides)
"""


def test_arrays_of_the_server_are_contiguous() -> None:
    """Arrays that such a server makes are contiguous.

    The test runs in its own process, because the repair is permanent.
    """
    done = subprocess.run([sys.executable, "-c", CALL_AS_OLD_PYBIND11], capture_output=True, text=True, check=False)
    assert done.stdout == "[1, 2, 3, 4, 5, 6] (1,)\n", done.stderr
