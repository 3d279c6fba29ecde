"""Device memory, streams and CUDA graphs through cuda-python, with a check of every call.

Tests run `Cuda.open` on cuda-python, and the rest on a stand-in that keeps device memory on the host. The tests do not
show that a GPU behaves as expected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtspec.errors import CapacityError, DependencyError, DeviceError, EngineError

LEAST_DRIVER = 13000
"""Least driver version, 1000 * major + 10 * minor, for CUDA 13's runtime, with which TensorRT 11 is built."""

_LOST = frozenset((46, 201, 214, 220, 700, 702, *range(709, 711), *range(714, 720), 721, 999))
"""Values of cudaError_t after which nothing can run on the device: faults of kernels, memory errors, lost contexts."""


@dataclass(frozen=True)
class Memory:
    """A range of device memory, which is freed when the object is collected."""

    address: int
    nbytes: int

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@dataclass(frozen=True)
class DeviceTensor:
    """A contiguous tensor on the device, with the part of torch.Tensor's interface that caches need."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: Memory

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def data_ptr(self) -> int:
        return self.memory.address


class Cuda:
    """The first GPU. `runtime` is cuda.bindings.runtime, or a replacement with the same functions."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    @classmethod
    def open(cls) -> Cuda:
        """Open the first GPU. DependencyError if cuda-python, a recent enough driver, or a GPU is missing."""
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise DependencyError(
                f"the tensorrt backend needs cuda-python ({error}): pip install 'trtspec[tensorrt]'"
            ) from error
        cuda = cls(runtime)
        driver = cuda.driver_version
        if driver == 0:
            raise DependencyError(
                "there is no NVIDIA driver here, and so no GPU for the tensorrt backend; install the driver, or use "
                "the backend aoti or onnx"
            )
        if driver < LEAST_DRIVER:
            raise DependencyError(
                f"the NVIDIA driver serves CUDA {cuda_version(driver)}, and TensorRT 11 needs "
                f"{cuda_version(LEAST_DRIVER)} or newer: update the driver"
            )
        status, count = runtime.cudaGetDeviceCount()
        if int(status) != 0 or not count:
            raise DependencyError(f"the driver shows no GPU ({cuda._said(status)}); check CUDA_VISIBLE_DEVICES")
        return cuda

    @property
    def driver_version(self) -> int:
        """Version of the driver, 1000 * major + 10 * minor; 0 if there is no driver."""
        return int(self._call("cudaDriverGetVersion"))

    def device(self) -> dict[str, str]:
        """Return the GPU's name and compute capability."""
        properties = self._call("cudaGetDeviceProperties", 0)
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        return {"gpu": name.rstrip("\0"), "compute_capability": f"{properties.major}.{properties.minor}"}

    def allocate(self, nbytes: int) -> Memory:
        """Allocate device memory. CapacityError if there is not enough."""
        error, address = self._runtime.cudaMalloc(max(nbytes, 1))
        self._check_device("cudaMalloc", error)
        if int(error) != 0:
            raise CapacityError(
                f"{nbytes / 1e9:.2f} GB of device memory were refused ({self._said(error)}); lower kv_cache_memory, "
                "max_batch_size or max_num_tokens"
            )
        memory = Memory(int(address), nbytes)
        weakref.finalize(memory, self._runtime.cudaFree, int(address))
        return memory

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int) -> DeviceTensor:
        """Allocate a tensor and queue its fill with zeros."""
        count = 1
        for size in shape:
            count *= size
        tensor = DeviceTensor(shape, dtype, self.allocate(count * dtype.itemsize))
        self._call("cudaMemsetAsync", tensor.data_ptr(), 0, tensor.nbytes, stream)
        return tensor

    def stream(self) -> int:
        """Create a stream, which lives as long as the process."""
        return int(self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking))

    def to_device(self, address: int, tensor: Tensor, stream: int) -> None:
        """Queue a copy of a contiguous host tensor to the device. `tensor` must not change until the stream is done."""
        if tensor.nbytes:
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
            self._call("cudaMemcpyAsync", address, tensor.data_ptr(), tensor.nbytes, kind, stream)

    def to_host(self, tensor: Tensor, address: int, stream: int) -> None:
        """Queue a copy from the device into a contiguous host tensor."""
        if tensor.nbytes:
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
            self._call("cudaMemcpyAsync", tensor.data_ptr(), address, tensor.nbytes, kind, stream)

    def synchronize(self, stream: int) -> None:
        """Wait for all work queued on the stream."""
        self._call("cudaStreamSynchronize", stream)

    def capture(self, stream: int, launch: Callable[[], None]) -> Callable[[], None]:
        """Capture what `launch` queues as a CUDA graph; return a function that queues it. Nothing else may run."""
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)
        try:
            launch()
        finally:
            graph = self._call("cudaStreamEndCapture", stream)
        executable = self._call("cudaGraphInstantiate", graph, 0)
        self._call("cudaGraphDestroy", graph)
        return lambda: self._call("cudaGraphLaunch", executable, stream)

    def check(self) -> None:
        """Raise DeviceError if the device is lost, for callers whose own call only says that it failed."""
        self._check_device("cudaPeekAtLastError", *self._runtime.cudaPeekAtLastError())

    def _check_device(self, name: str, error: Any) -> None:
        if int(error) in _LOST:
            raise DeviceError(f"{name}: {self._said(error)}; the GPU failed, start this process anew")

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a runtime function and return its results without the error code.

        EngineError, or DeviceError if the device is lost, names the function.
        """
        error, *values = getattr(self._runtime, name)(*arguments)
        self._check_device(name, error)
        if int(error) != 0:
            raise EngineError(f"{name}: {self._said(error)}")
        return values[0] if len(values) == 1 else tuple(values) if values else None

    def _said(self, error: Any) -> str:
        _, text = self._runtime.cudaGetErrorString(error)
        return text.decode() if isinstance(text, bytes) else str(text)


def cuda_version(version: int) -> str:
    """Text of a driver's version 1000 * major + 10 * minor: 13000 -> "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"
