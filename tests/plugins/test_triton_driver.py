"""Launches through Triton's own launch code, with a driver that has no device (without TRITON_INTERPRET).

Triton specialises, compiles and binds each launch as on a GPU. Where it would call CUDA, the arguments are checked.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: pip install 'trtspec[triton]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from trtspec_plugins.triton.kernels import LAUNCHES, kernels

SHARED_BYTES, THREADS = 232448, 1024  # of a block of an H100
GRID = (2**31 - 1, 65535, 65535)
INTEGERS = {"i32": 31, "i64": 63, "u1": 1, "i1": 1}  # bits of the largest value
FLOATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv"}
TYPES = {
    **FLOATS, torch.int32: "i32", torch.int64: "i64", torch.int8: "i8", torch.uint8: "u8", torch.bool: "u1"
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What Triton hands to CUDA."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    signature: dict[str, str]  # of each argument: a type, or "constexpr"
    arguments: tuple[Any, ...]


class NoDevice:
    """A driver of Triton for an H100 that is not present. `launches` holds what was launched.

    Each driver has a device number of its own, as Triton keeps compiled kernels by device.
    """

    devices = itertools.count()

    def __init__(self) -> None:
        self.device = next(self.devices)
        self.launches: list[Launch] = []
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (None, 1, 255, 0, THREADS),  # module, function, registers, spills, threads
            get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES},
            unload_module=lambda _: None,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            _, _, _, _, *arguments = rest  # metadata, and hooks
            threads, signature = metadata.num_warps * 32, dict(source.signature)
            self.launches.append(Launch(metadata.name, (x, y, z), threads, signature, tuple(arguments)))

        return launch

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NoDevice:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    made = NoDevice()
    monkeypatch.setattr(driver, "_active", made)  # reset_active() would look for a GPU
    return made


QUICK = ("rms_norm-bf16", "spec_accept")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAUNCHES]
)
def test_what_is_launched_is_what_was_compiled(no_device: NoDevice, name: str) -> None:
    LAUNCHES[name]()
    assert {one.kernel for one in no_device.launches} == {kernel.function.__name__ for kernel in kernels(name)}
    for one in no_device.launches:
        assert all(1 <= size <= most for size, most in zip(one.grid, GRID, strict=True)), one.grid
        assert one.threads <= THREADS
        for (argument, kind), value in zip(one.signature.items(), one.arguments, strict=True):
            assert kind == "constexpr" or fits(value, kind), f"{one.kernel}: {argument}, a {kind}, is {value}"


def fits(value: Any, kind: str) -> bool:
    """Whether a launcher of Triton may take the value as an argument of this type."""
    if kind.startswith("*"):
        return isinstance(value, torch.Tensor) and TYPES[value.dtype] == kind[1:]
    if kind in INTEGERS:
        return isinstance(value, int) and -(2 ** INTEGERS[kind]) <= value < 2 ** INTEGERS[kind]
    return kind == "fp32" and isinstance(value, float)


def test_a_launch_that_takes_too_much_shared_memory_is_refused(
    no_device: NoDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in is asked for the device's limits."""
    monkeypatch.setattr(no_device.utils, "get_device_properties", lambda _: {"max_shared_mem": -1})
    with pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory"):
        LAUNCHES["spec_accept"]()
