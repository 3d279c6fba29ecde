"""A GPU's queue of work through torch (one stream, CUDA graphs, events), and error messages where no GPU works."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from trtspec.errors import CapacityError, DependencyError, DeviceError, UnsupportedError

LEAST_CAPABILITY = (8, 0)
"""Least compute capability for the kernels, which need bf16 on tensor cores and asynchronous copies."""

KERNELS = ("spec_attention_", "packed_linear")
"""Ops that backend cuda runs by a plugin's kernels alone."""

_WARM_UPS = 2  # runs before a capture; the first compiles kernels and allocates workspaces of libraries


class Mark(Protocol):
    """A point in a queue of work."""

    def wait(self) -> None:
        """Wait until all work queued before the mark is done. DeviceError if the device failed."""
        ...


class WorkQueue(Protocol):
    """A queue of work items that a device does one after the other, while the host goes on.

    A work item is a function that changes tensors on the device, or copies to or from pinned memory. Host memory that
    the item reads must not change until a mark after the item is reached.
    """

    @property
    def device(self) -> torch.device: ...

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a work item."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` at least once; return a work item that does the same on the same memory at less host cost."""
        ...

    def mark(self) -> Mark:
        """Return a mark at the present end of the queue."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate [nbytes] uint8 of host memory, which the device can copy to and from by itself."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """Inside a work item: return a copy on the device. After its submit, the host may write to `tensor`."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Inside a work item: return a copy in host memory, which is complete when a mark after the item is reached."""
        ...


class CudaQueue:
    """A WorkQueue on a stream of the current GPU.

    Only the tests in tests/gpu run it, on a GPU; other tests replace it by a thread of the CPU.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # memory pool that all graphs share, as they never run at the same time

    def submit(self, work: Callable[[], None]) -> None:
        """Queue work on the stream, after what the caller has queued on its own stream (weights, zeros)."""
        with device_errors():
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run work as warm-up, capture it as a CUDA graph, and return the function that replays the graph.

        Python's garbage collection is off meanwhile: the graphs and pinned memory of an engine that is gone, if freed
        by this thread, would end the capture.
        """
        for _ in range(_WARM_UPS):
            self.submit(work)
        self.mark().wait()
        graph = torch.cuda.CUDAGraph()
        with (
            device_errors(),
            _no_garbage_collection(),
            torch.cuda.device(self.device),  # torch waits for the thread's current GPU, which may be another
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        self._pool = graph.pool()
        return graph.replay

    def mark(self) -> Mark:
        """Record an event at the end of the stream and return it as a mark."""
        with device_errors():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _CudaMark(event)

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate [nbytes] uint8 of pinned host memory, zeroed."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the GPU through pinned memory, without waiting."""
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the GPU to pinned host memory, without waiting."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        with device_errors():
            self._event.synchronize()


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn out-of-memory errors into CapacityError and all other errors of CUDA into DeviceError.

    After a DeviceError nothing more runs on the GPU.
    """
    try:
        yield
    except RuntimeError as error:
        if "CUDA" in str(error) and "out of memory" in str(error):  # of torch's allocator, CUDA itself or Triton
            raise CapacityError(
                f"the GPU's memory is full ({str(error).splitlines()[0]}); lower max_num_tokens, max_batch_size or "
                "kv_cache_memory"
            ) from error
        if "CUDA" not in str(error):
            raise
        raise DeviceError(
            f"the GPU failed: {str(error).splitlines()[0]}; start this process anew (CUDA_LAUNCH_BLOCKING=1 in the "
            "environment shows which call it was)"
        ) from error


def open_gpu() -> torch.device:
    """Return the current GPU. DependencyError if torch has no usable GPU, UnsupportedError if the GPU is too old."""
    if torch.version.cuda is None:
        raise DependencyError(
            f"torch {torch.__version__} is built without CUDA; install the build for your driver: "
            "https://pytorch.org/get-started/locally, or use the backend aoti"
        )
    if not torch.cuda.is_available():
        raise DependencyError(no_gpu(torch.version.cuda, driver_version()))
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if capability < LEAST_CAPABILITY:
        raise UnsupportedError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, and the kernels want "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer (Ampere and later); use another GPU, or the backend "
            "aoti on the CPU"
        )
    known = torch.cuda.get_arch_list()
    if not runs_on(capability, known):
        raise UnsupportedError(
            f"torch {torch.__version__} is built for {', '.join(known)}, and {name} is an sm_{capability[0]}"
            f"{capability[1]}; install a torch build that serves it"
        )
    return device


def require_kernels(device: torch.device) -> None:
    """Raise DependencyError if loaded plugins have no kernels for a GPU, as the references' bits depend on the batch.

    TRTSPEC_PLUGINS=0 in the environment asks for the references, for debugging.
    """
    if device.type != "cuda" or os.environ.get("TRTSPEC_PLUGINS") == "0":
        return
    missing = [op for op in KERNELS if not torch._C._dispatch_has_kernel_for_dispatch_key(f"trtspec::{op}", "CUDA")]
    if missing:
        raise DependencyError(
            f"no kernels for GPUs are loaded for {', '.join(missing)}: pip install 'trtspec[triton]', and leave "
            "TRTSPEC_PLUGINS unset or name triton in it, or use the backend aoti"
        )


def free_memory(device: torch.device) -> int:
    """Bytes of the GPU's memory that are free, after torch has returned what it kept of engines that are gone."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def runs_on(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether code for these architectures ("sm_90", "compute_90": PTX) runs on a GPU of that compute capability."""
    for architecture in built_for:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        major, minor = int(digits[:-1]), int(digits[-1])
        if number != digits and (major, minor) != capability:
            continue  # this code runs only on that capability
        if (major, minor) <= capability and (major == capability[0] or kind == "compute"):
            return True
    return False


def driver_version() -> int | None:
    """CUDA version that the driver supports, 1000 * major + 10 * minor; None if there is no driver."""
    try:
        version = int(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None
    return version or None


def no_gpu(toolkit: str, driver: int | None) -> str:
    """Text of why torch, built with CUDA `toolkit` ("13.0"), sees no GPU, and of what to do."""
    if driver is None:
        return "there is no NVIDIA driver here, and so no GPU; install the driver, or use the backend aoti"
    major, minor = driver // 1000, driver % 1000 // 10
    wanted = tuple(int(part) for part in toolkit.split(".")[:2])
    if major < wanted[0]:  # within a major version older drivers serve newer toolkits
        return (
            f"the NVIDIA driver serves CUDA {major}.{minor}, and torch is built with CUDA {toolkit}: update the "
            f"driver, or install a torch build for CUDA {major}"
        )
    return "the driver shows no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"
