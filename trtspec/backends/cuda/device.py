"""A GPU's queue of work through torch: one stream, CUDA graphs, events; and what is said where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from trtspec.errors import CapacityError, DependencyError, DeviceError, UnsupportedError

LEAST_CAPABILITY = (8, 0)
"""What the kernels want of a GPU: bf16 on tensor cores, and asynchronous copies."""

_WARM_UPS = 2  # before a capture: the first run compiles kernels, and makes the workspaces of libraries


class Mark(Protocol):
    """A place in a queue."""

    def wait(self) -> None:
        """Until all that was queued before it is done. DeviceError if the device failed."""
        ...


class WorkQueue(Protocol):
    """Work that a device does one piece after the other, while the host goes on.

    A piece of work is a function that changes tensors on the device, or copies to or from pinned memory. What it reads
    of the host's memory must stay as it is until a mark behind it is reached.
    """

    @property
    def device(self) -> torch.device: ...

    def submit(self, work: Callable[[], None]) -> None:
        """Queue it."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do it once or more, and return work that does the same on the same memory, at less cost to the host."""
        ...

    def mark(self) -> Mark:
        """The present end of the queue."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """[nbytes] uint8 of the host's memory, which the device can copy to and from by itself."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """Within a piece of work: a copy on the device. The host's tensor may be written to once work was submitted."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Within a piece of work: a copy in the host's memory, which is there once a mark behind it is reached."""
        ...


class CudaQueue:
    """A WorkQueue on a stream of the current GPU. The tests in tests/gpu alone run it; others have a thread of the CPU
    in its place."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # of memory, which all graphs share: they never run at the same time

    def submit(self, work: Callable[[], None]) -> None:
        """See WorkQueue. What the caller has queued on its own stream (weights, zeros) comes first."""
        with device_errors():
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See WorkQueue."""
        for _ in range(_WARM_UPS):
            self.submit(work)
        self.mark().wait()
        graph = torch.cuda.CUDAGraph()
        with (
            device_errors(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        self._pool = graph.pool()
        return graph.replay

    def mark(self) -> Mark:
        """See WorkQueue."""
        with device_errors():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _CudaMark(event)

    def pinned(self, nbytes: int) -> Tensor:
        """See WorkQueue."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        """See WorkQueue."""
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """See WorkQueue."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        with device_errors():
            self._event.synchronize()


@contextmanager
def device_errors() -> Iterator[None]:
    """Memory that is not there is a CapacityError, all else that CUDA reports a DeviceError: nothing runs after it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the GPU's memory is full ({str(error).splitlines()[0]}); lower max_num_tokens, max_batch_size or "
            "kv_cache_memory"
        ) from error
    except RuntimeError as error:
        if "CUDA" not in str(error):
            raise
        raise DeviceError(
            f"the GPU failed: {str(error).splitlines()[0]}; start this process anew (CUDA_LAUNCH_BLOCKING=1 in the "
            "environment shows which call it was)"
        ) from error


def open_gpu() -> torch.device:
    """The current GPU. DependencyError where torch has none to work with, UnsupportedError for one that is too old."""
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


def free_memory(device: torch.device) -> int:
    """Bytes of the GPU's memory that nobody has."""
    return int(torch.cuda.mem_get_info(device)[0])


def runs_on(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether code for these architectures ("sm_90", "compute_90": PTX) runs on a GPU of that compute capability."""
    for architecture in built_for:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        major, minor = int(digits[:-1]), int(digits[-1])
        if number != digits and (major, minor) != capability:
            continue  # for that one alone
        if (major, minor) <= capability and (major == capability[0] or kind == "compute"):
            return True
    return False


def driver_version() -> int | None:
    """What CUDA version the driver serves, 1000 * major + 10 * minor; None where there is no driver."""
    try:
        version = int(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None
    return version or None


def no_gpu(toolkit: str, driver: int | None) -> str:
    """Why torch, built with CUDA `toolkit` ("13.0"), sees no GPU, and what to do."""
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
