"""The run-time side of TensorRT and CUDA for machines without a GPU.

Device memory is host memory. A "plan" is a network of tests/fake_tensorrt that runs on the addresses it is bound to.

Methods have the names and parameters of the real bindings (tests/contract/test_tensorrt_runtime_api.py compares them).
They refuse what the bindings document as wrong: shapes outside the profile, tensors without an address, work that was
not bound, a capture before any run. The computation is not TensorRT's; which tensor is bound to which memory, and when,
is.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fake_tensorrt.api import TORCH
from tests.fake_tensorrt.builder import FakeBuilder, FakeConfig, FakeTensorRT
from tests.fake_tensorrt.network import FakeNetwork


class CudaRuntime:
    """The part of cuda.bindings.runtime that Cuda calls. Queued work runs at once, unless it is captured."""

    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, memory: int = 2**30, driver: int = 13000, devices: int = 1) -> None:
        self.blocks: dict[int, Any] = {}
        self.memory, self.driver, self.devices = memory, driver, devices
        self.capturing: list[Callable[[], None]] | None = None
        self.launched_graphs = 0
        self.capture_fails = False
        self.lost = False  # a kernel has failed, and with it everything since

    def cudaDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.driver

    def cudaGetDeviceCount(self) -> tuple[int, int | None]:
        return (0, self.devices) if self.devices else (100, None)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, {2: b"out of memory", 100: b"no CUDA-capable device is detected"}.get(error, b"error %d" % error)

    def cudaGetDeviceProperties(self, device: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(name=b"Stand-in\0\0", major=9, minor=0)

    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        used = sum(len(block) for block in self.blocks.values())
        return 0, self.memory - used, self.memory

    def cudaMalloc(self, size: int) -> tuple[int, int | None]:
        if size > self.cudaMemGetInfo()[1]:
            return 2, None
        block = (ctypes.c_char * size)()
        ctypes.memset(block, 0xA5, size)  # arbitrary contents, as in a GPU's memory
        self.blocks[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaFree(self, devPtr: int) -> tuple[int]:
        del self.blocks[devPtr]
        return (0,)

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: int) -> tuple[int]:
        self.owns(devPtr, count)
        ctypes.memset(devPtr, value, count)
        return (0,)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: int, stream: int) -> tuple[int]:
        self.owns(dst if kind == 1 else src, count)
        ctypes.memmove(dst, src, count)
        return (0,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        return 0, 77

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        return self.cudaPeekAtLastError()

    def cudaPeekAtLastError(self) -> tuple[int]:
        return (700 if self.lost else 0,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        self.capturing = []
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:
        found, self.capturing = self.capturing, None
        return (900, None) if self.capture_fails else (0, found)

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:
        return 0, list(graph)

    def cudaGraphDestroy(self, graph: Any) -> tuple[int]:
        return (0,)

    def cudaGraphLaunch(self, graphExec: Any, stream: int) -> tuple[int]:
        self.launched_graphs += 1
        for call in graphExec:
            call()
        return (0,)

    def owns(self, address: int, count: int) -> None:
        """Fail unless all of that memory was handed out, by one allocation."""
        assert any(start <= address and address + count <= start + len(block) for start, block in self.blocks.items())

    def queue(self, call: Callable[[], None]) -> None:
        if self.capturing is None:
            call()
        else:
            self.capturing.append(call)


_NUMBERS = itertools.count()  # of plans, so that no two in a process are equal


class TensorRT(FakeTensorRT):
    """The module `tensorrt`, builder included. plans: contents of a plan's file -> its network and config."""

    int32, int64, float32, float16, bfloat16 = "int32", "int64", "float32", "float16", "bfloat16"
    ExecutionContextAllocationStrategy = SimpleNamespace(STATIC=0, USER_MANAGED=2)

    def __init__(self, cuda: CudaRuntime) -> None:
        self.cuda = cuda
        self.plans: dict[bytes, tuple[FakeNetwork, FakeConfig]] = {}

    def Runtime(self, logger: Any) -> Any:
        return Runtime(self)

    def Refitter(self, engine: Engine, logger: Any) -> Any:
        return Refitter(engine, logger)

    @property
    def Builder(self) -> Any:
        plans = self.plans

        class Builder(FakeBuilder):
            def _build_serialized_network(self, network: FakeNetwork, config: FakeConfig) -> bytes:
                assert super()._build_serialized_network(network, config)
                network._copy_weights()
                contents = b"plan %d" % next(_NUMBERS)
                plans[contents] = network, config
                return contents

        return Builder


class Runtime:
    def __init__(self, trt: TensorRT) -> None:
        self.trt = trt
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Engine | None:
        plan = self.trt.plans.get(serialized_engine)
        if plan is None or ("VERSION_COMPATIBLE" in plan[1]._flags and not self.engine_host_code_allowed):
            return None
        return Engine(self.trt, *plan)


class Refitter:
    """A refitter. Weights that are not in the plan are `missing` until the same weights are set."""

    def __init__(self, engine: Engine, logger: Any) -> None:
        self.engine = engine

    def get_missing_weights(self) -> list[str]:
        return sorted(self.engine.missing)

    def get_weights_prototype(self, weights_name: str) -> Any:
        weights = self.engine.missing[weights_name]._arguments["weights"]
        return SimpleNamespace(dtype=weights._type, size=weights._count)

    def set_named_weights(self, name: str, weights: Any) -> bool:
        layer = self.engine.missing[name]
        same = torch.equal(weights._read(tuple(layer._arguments["shape"])), layer._value())
        if same:
            del self.engine.missing[name]
        return same

    def refit_cuda_engine(self) -> bool:
        return not self.engine.missing


class Engine:
    device_memory_size_v2 = 1024
    num_optimization_profiles = 2
    weight_streaming_budget_v2 = 0

    def __init__(self, trt: TensorRT, network: FakeNetwork, config: FakeConfig) -> None:
        self.trt, self.network = trt, network
        self.profiles = [profile._shapes for profile in config._profiles]
        self.tensors = {tensor.name: tensor for tensor in (*network._inputs, *network._outputs)}
        self.names = list(self.tensors)
        self.inputs = [tensor.name for tensor in network._inputs]
        self.aliases = network._aliases()
        self.num_io_tensors = len(self.names)
        self.missing = network._constants() if "STRIP_PLAN" in config._flags else {}
        self.streamable_weights_size = 4096 * ("WEIGHT_STREAMING" in config._flags)

    def get_weight_streaming_automatic_budget(self) -> int:
        return 2048

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_dtype(self, name: str) -> str:
        return str(self.dtype(name)).removeprefix("torch.")

    def dtype(self, name: str) -> torch.dtype:
        return TORCH[self.tensors[name].dtype]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return list(self.profiles[profile_index][name])

    def create_execution_context(self, strategy: int = 0) -> Context:
        return Context(self, strategy)


class Context:
    def __init__(self, engine: Engine, strategy: int) -> None:
        self.engine, self.strategy = engine, strategy
        self.profile: Mapping[str, Any] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.work = 0
        self.results: dict[str, tuple[int, ...]] = {}
        self.ran = False
        self.bindings = 0  # counts the changes of shapes and addresses

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profile = self.engine.profiles[profile_index]
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        self.engine.trt.cuda.owns(memory, size)
        self.work = size

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        assert self.profile is not None, "no profile was set"
        least, _, most = self.profile[name]
        fits = len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))
        if fits:
            self.bindings += self.shapes.get(name) != tuple(shape)
            self.shapes[name] = tuple(shape)
        return fits

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert name in self.engine.names
        self.bindings += self.addresses.get(name) != memory
        self.addresses[name] = memory
        return True

    def get_max_output_size(self, name: str) -> int:
        if self.shapes.keys() != set(self.engine.inputs):
            return -1
        assert self.profile is not None
        most = self._shape(name, {key: shapes[2] for key, shapes in self.profile.items()})
        return math.prod(most) * self.engine.dtype(name).itemsize

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._shape(name, self.shapes)

    def _shape(self, name: str, given: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of an output, for inputs of the given shapes."""
        (T,), (B,), K = given["input_ids"], given["kv_lens"], given.get("draft_tokens", (0, 0))[1]
        if name in ("hidden_states", "next_draft_tokens"):
            return T if name == "hidden_states" else B, self.engine.tensors[name].shape[1]
        if name == "tokens":
            return given["gather_ids"]
        if name == "logits":
            return *given["gather_ids"], self.engine.tensors[name].shape[1]
        return (B,) if name in ("num_tokens", "next_draft_lens", "next_kv_lens") else (B, K + 1)

    def execute_async_v3(self, stream_handle: int) -> bool:
        cuda = self.engine.trt.cuda
        assert self.strategy == 0 or self.work, "no memory to work in"
        assert not self.engine.missing, "weights are missing"
        assert self.ran or cuda.capturing is None, "TensorRT wants to have run before it is captured"
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        if shapes.keys() != set(self.engine.inputs) or addresses.keys() != set(self.engine.names):
            return False
        bindings = self.bindings if cuda.capturing is not None else None

        def run() -> None:
            assert bindings in (None, self.bindings), "the context of a captured graph has been bound to others since"
            self._compute(shapes, addresses)

        cuda.queue(run)
        self.ran = True
        return True

    @torch.no_grad()
    def _compute(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        engine = self.engine

        def over(name: str, shape: tuple[int, ...]) -> Tensor:
            dtype, count = engine.dtype(name), math.prod(shape)
            if not count:
                return torch.empty(shape, dtype=dtype)
            engine.trt.cuda.owns(addresses[name], count * dtype.itemsize)
            memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(addresses[name])
            return torch.frombuffer(memory, dtype=dtype).view(shape)

        for new, old in engine.aliases.items():
            assert addresses[new] == addresses[old], f"{new} is not bound to the memory of {old}"
        results = engine.network._run({name: over(name, shapes[name]).clone() for name in engine.inputs})
        for name, result in results.items():
            over(name, tuple(result.shape)).copy_(result)
