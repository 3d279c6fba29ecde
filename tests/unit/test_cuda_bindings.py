"""CUDA and TensorRT on a machine that lacks them, or has too little of them: errors that name what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from tests.tensorrt_stand_in import CudaRuntime
from trtspec.backends.tensorrt import executable as tensorrt
from trtspec.backends.tensorrt.cuda import Cuda
from trtspec.errors import CapacityError, DependencyError, DeviceError, EngineError


def test_too_little_device_memory_is_a_capacity_error() -> None:
    with pytest.raises(
        CapacityError, match=r"2\.15 GB of device memory were refused \(out of memory\); lower kv_cache"
    ):
        Cuda(CudaRuntime()).allocate(2**31)


@pytest.mark.parametrize(("status", "lost"), [(1, False), (900, False), (700, True), (719, True)])
def test_only_a_lost_device_ends_the_engine(monkeypatch: pytest.MonkeyPatch, status: int, lost: bool) -> None:
    runtime = CudaRuntime()
    monkeypatch.setattr(runtime, "cudaStreamSynchronize", lambda stream: (status,))
    monkeypatch.setattr(runtime, "cudaMalloc", lambda size: (status, None))
    with pytest.raises(EngineError, match=f"cudaStreamSynchronize: error {status}") as failed:
        Cuda(runtime).synchronize(77)
    assert isinstance(failed.value, DeviceError) == lost
    with pytest.raises(DeviceError if lost else CapacityError):
        Cuda(runtime).allocate(1)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a stand-in where Cuda.open finds cuda-python."""

    def put(**facts: int) -> None:
        stand_in = CudaRuntime(**facts)
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(runtime=stand_in)))
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=stand_in))

    return put


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"driver": 0}, "no NVIDIA driver here.*use the backend aoti or onnx"),
        ({"driver": 12080}, r"driver serves CUDA 12\.8, and TensorRT 11 needs 13\.0 or newer: update"),
        ({"devices": 0}, r"shows no GPU \(no CUDA-capable device is detected\); check CUDA_VISIBLE_DEVICES"),
    ],
    ids=["no driver", "old driver", "no GPU"],
)
def test_what_is_missing_is_named(runtime: Callable[..., None], facts: dict[str, int], message: str) -> None:
    runtime(**facts)
    with pytest.raises(DependencyError, match=message):
        Cuda.open()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "tensorrt"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DependencyError, match=r"needs cuda-python .*pip install 'trtspec\[tensorrt\]'"):
        Cuda.open()
    tensorrt.load_tensorrt.cache_clear()
    with pytest.raises(DependencyError, match=r"TensorRT is missing .*pip install 'trtspec\[tensorrt\]'"):
        tensorrt.load_tensorrt()
