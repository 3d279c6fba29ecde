"""Run TensorRT plans, with an execution context for each of their two profiles and two alternating sets of buffers.

Caches lie on the device. A plan's new caches are bound to the addresses of the old caches, which its plugins alias.
Inputs are copied to the device and outputs to the host, on one stream. Steps of generations alone are captured as CUDA
graphs by shapes and buffers, the second time that they occur. A graph has an execution context of its own, as setting
other shapes may change what a context's graphs read. If a capture fails, as with plugins that call Python, steps are
queued call by call.

tests/e2e/test_tensorrt_runtime.py runs this file on stand-ins for TensorRT and CUDA, which does not show that a plan
runs. tests/gpu/test_tensorrt.py shows that on machines with both.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from trtspec.backends.compiled import WEIGHTS, CompiledExecutable, CompiledStep, Graph
from trtspec.backends.graph_io import INPUTS, SLOT_ROWS
from trtspec.backends.tensorrt.cuda import Cuda, DeviceTensor, Memory
from trtspec.backends.tensorrt.profiles import cache_shape
from trtspec.core import KVLayer, StepInputs, StepOutputs
from trtspec.errors import CheckpointError, DependencyError, DeviceError, EngineError

logger = logging.getLogger(__name__)

MIXED, GENERATION = 0, 1
"""Indices of the profiles, in the order of profiles.profiles."""

_MOST_GRAPHS = 64
"""Largest number of CUDA graphs that a plan keeps."""

_HISTORY, _LOGITS = "history", "logits"
_LEAST_HISTORY = 64
"""Least number of columns of a history in a step of generations."""

_RAISE = {  # name of an input's last size -> option of `trtspec build` that raises its limit
    "T": "--max_num_tokens",
    SLOT_ROWS: "--max_num_tokens",
    "columns": "--max_batch_size or --max_seq_len",
    "bans": "--max_batch_size, or ask for fewer stop ids with min_tokens",
    "known": "--max_seq_len",
    "biases": "--max_batch_size, or ask for fewer biases",
}


OLDEST = 11
"""Oldest major version of TensorRT: this module uses its API."""


@functools.cache
def load_tensorrt() -> Any:
    """Import the module tensorrt. DependencyError if it is not installed, or too old."""
    try:
        trt = importlib.import_module("tensorrt")
    except ImportError as error:
        raise DependencyError(f"TensorRT is missing ({error}): pip install 'trtspec[tensorrt]'") from error
    if int(trt.__version__.split(".")[0]) < OLDEST:
        raise DependencyError(
            f"TensorRT {trt.__version__} is too old, {OLDEST}.x is needed: pip install --upgrade 'trtspec[tensorrt]'"
        )
    return trt


@functools.cache
def open_cuda() -> Cuda:
    """Open the GPU with cuda.Cuda.open, once for all engines."""
    return Cuda.open()


def made_for(trt: Any, cuda: Cuda) -> dict[str, str]:
    """Return what a plan may depend on: version of TensorRT, name and compute capability of the GPU."""
    version = str(trt.__version__)
    return {"tensorrt": version, "tensorrt major version": version.split(".")[0], **cuda.device()}


class TensorRTExecutable(CompiledExecutable):
    """A CompiledExecutable that runs TensorRT plans.

    CheckpointError for plans made for another TensorRT or GPU, EngineError for inputs larger than a plan was built for.
    """

    def __init__(self, compiled: CompiledStep, folder: Path, kv: Sequence[KVLayer]) -> None:
        self._trt, self._cuda = self.library(), open_cuda()
        super().__init__(compiled, folder, kv)

    @classmethod
    def library(cls) -> Any:
        """Import the module that runs the plans."""
        return load_tensorrt()

    @classmethod
    def check(cls, compiled: CompiledStep) -> None:
        """Raise CheckpointError if the plans are for another TensorRT or GPU, DependencyError if one is missing."""
        here = made_for(load_tensorrt(), open_cuda())
        for what, value in compiled.made_for.items():
            if value != here.get(what):
                raise CheckpointError(
                    f"the engine was built for {what} {value}, this is {here.get(what)}; rebuild it here with "
                    "trtspec build"
                )

    @classmethod
    def allocate_kv(
        cls, compiled: CompiledStep, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> Sequence[KVLayer]:
        """Allocate the step's KV layers on the device, zeroed."""
        cuda = open_cuda()
        stream = cuda.stream()
        sizes = [cache_shape(num_blocks, block_size, heads, size, compiled.linear) for heads, size, _ in compiled.kv]
        layers = [(cuda.zeros(size, dtype, stream), cuda.zeros(size, dtype, stream)) for size in sizes]
        cuda.synchronize(stream)
        return cast("Sequence[KVLayer]", layers)

    def _load(self, folder: Path) -> Mapping[Graph, Callable[[list[Tensor]], list[Tensor]]]:
        trt, cuda = self._trt, self._cuda
        runtime, stream = trt.Runtime(trt.Logger(trt.Logger.WARNING)), cuda.stream()
        self._prepare(runtime)
        caches = {f"{'kv'[i % 2]}_cache_{i // 2}": cast(DeviceTensor, kv) for i, kv in enumerate(self._flat_kv)}
        stripped = (folder / WEIGHTS).is_file()
        weights = load_file(folder / WEIGHTS) if stripped else {}
        found = {}
        for graph in self.compiled.graphs:
            engine = runtime.deserialize_cuda_engine((folder / graph.file).read_bytes())
            if engine is None:
                raise CheckpointError(
                    f"TensorRT {trt.__version__} cannot read {folder / graph.file}, its messages say why; copy the "
                    "file again, or rebuild the engine with trtspec build"
                )
            if weights:
                _refit(trt, engine, weights, folder / graph.file)
            if engine.streamable_weights_size:  # weights that do not fit on the device stay on the host
                engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
            found[graph] = _Plan(trt, cuda, engine, graph, self.compiled.outputs, caches, stream)
        self._runtime = runtime  # must live as long as the engines
        self._plans = list(found.values())
        return {graph: plan.run for graph, plan in found.items()}

    def _prepare(self, runtime: Any) -> None:
        """Set up a runtime before it reads plans."""
        if "tensorrt" not in self.compiled.made_for:
            runtime.engine_host_code_allowed = True  # version-compatible plans contain a runtime of their own

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Run a step. Logits are copied to the host, and returned, only for a batch with constraints."""
        for plan in self._plans:
            plan.gives_logits = inputs.spec.constraints is not None
        return super().run(inputs)


def _refit(trt: Any, engine: Any, weights: Mapping[str, Tensor], file: Path) -> None:
    """Set the weights of a stripped plan, from the file next to it. CheckpointError if weights are missing."""
    refitter = trt.Refitter(engine, trt.Logger(trt.Logger.WARNING))
    for name in refitter.get_missing_weights():
        wanted = refitter.get_weights_prototype(name)
        if name not in weights or weights[name].numel() != wanted.size:
            raise CheckpointError(f"{file} wants {wanted.size} weights {name}, which are not there; rebuild the engine")
        refitter.set_named_weights(name, trt.Weights(wanted.dtype, weights[name].data_ptr(), wanted.size))
    if not refitter.refit_cuda_engine():
        raise EngineError(f"{file}: TensorRT did not take its weights, its messages say why")


class _Plan:
    """A plan with its execution contexts and buffers."""

    def __init__(
        self, trt: Any, cuda: Cuda, engine: Any, graph: Graph, outputs: Sequence[str],
        caches: Mapping[str, DeviceTensor], stream: int,
    ) -> None:  # fmt: skip
        self.cuda, self.engine, self.graph, self.outputs, self.stream = cuda, engine, graph, outputs, stream
        names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        wanted = {*graph.inputs, *outputs, *caches, *(f"new_{name}" for name in caches)}
        if names != wanted:
            raise CheckpointError(
                f"{graph.file}: {', '.join(sorted(names ^ wanted))} are missing or too many; rebuild the engine"
            )
        dtypes = {
            getattr(trt, name): getattr(torch, name) for name in ("int32", "int64", "float32", "float16", "bfloat16")
        }
        self.dtypes = [dtypes[engine.get_tensor_dtype(name)] for name in outputs]
        self.largest = [
            {name: tuple(engine.get_tensor_profile_shape(name, profile)[2]) for name in graph.inputs}
            for profile in (MIXED, GENERATION)
        ]
        self.trt, self.caches = trt, caches
        self.work = cuda.allocate(int(engine.device_memory_size_v2))  # for all contexts, which never run at once
        self.contexts = [self._context(profile) for profile in (MIXED, GENERATION)]
        self.sets = [self._buffers() for _ in range(2)]  # so inputs do not overwrite those of the last step
        self.turn = 0
        self.seen: set[tuple[Any, ...]] = set()
        self.captured: dict[tuple[Any, ...], tuple[Callable[[], None], Any]] = {}  # launches, with their contexts
        self.may_capture = True
        self.gives_logits = True

    def _context(self, profile: int) -> Any:
        """Create a context of a profile, with caches bound."""
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self.engine.create_execution_context(strategy)
        if context is None or not context.set_optimization_profile_async(profile, self.stream):
            raise EngineError(
                f"{self.graph.file}: TensorRT made no context for profile {profile}, its messages say why"
            )
        context.set_device_memory(self.work.address, self.work.nbytes)
        for name, cache in self.caches.items():
            context.set_input_shape(name, cache.shape)
            context.set_tensor_address(name, cache.data_ptr())
            context.set_tensor_address(f"new_{name}", cache.data_ptr())
        return context

    def _buffers(self) -> dict[str, Memory]:
        """Allocate a buffer for every input and output, with the size of the larger profile."""
        sizes = dict.fromkeys((*self.graph.inputs, *self.outputs), 0)
        for context, largest in zip(self.contexts, self.largest, strict=True):
            for name, shape in largest.items():
                context.set_input_shape(name, shape)
                elements = functools.reduce(int.__mul__, shape, 1)
                sizes[name] = max(sizes[name], elements * (INPUTS[name].dtype or torch.float32).itemsize)
            for name in self.outputs:
                sizes[name] = max(sizes[name], int(context.get_max_output_size(name)))
        return {name: self.cuda.allocate(size) for name, size in sizes.items()}

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the plan: graph.inputs -> the step's outputs, on the host. It changes the caches."""
        i = self.graph.inputs.index("block_tables")
        tables, columns = tensors[i], self.largest[MIXED]["block_tables"][1]
        if not tables[:, columns:].any():  # these columns are reserved for growth
            tables = tables[:, :columns].contiguous()
        tensors = [*tensors[:i], tables, *tensors[i + 1 :]]
        profile = self._profile([tuple(tensor.shape) for tensor in tensors])
        if profile == GENERATION:  # tables and histories grow with sequences, but CUDA graphs are kept by shape
            tensors[i] = F.pad(tables, (0, columns - tables.shape[1]))
            if _HISTORY in self.graph.inputs:
                j, most = self.graph.inputs.index(_HISTORY), self.largest[MIXED][_HISTORY][1]
                tensors[j] = _widened(tensors[j], most)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        buffers, self.turn = self.sets[self.turn], 1 - self.turn
        for name, tensor in zip(self.graph.inputs, tensors, strict=True):
            self.cuda.to_device(buffers[name].address, tensor, self.stream)
        context = self._launch(profile, shapes, buffers)
        results = []
        for name, dtype in zip(self.outputs, self.dtypes, strict=True):
            if name == _LOGITS and not self.gives_logits:
                results.append(torch.empty(0))
                continue
            result = torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtype)
            self.cuda.to_host(result, buffers[name].address, self.stream)
            results.append(result)
        self.cuda.synchronize(self.stream)
        return results

    def _profile(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Return the generation profile if a batch fits, as short prompts may, else mixed. EngineError if none fits."""
        if all(map(_within, shapes, self.largest[GENERATION].values())):
            return GENERATION
        for (name, most), shape in zip(self.largest[MIXED].items(), shapes, strict=True):
            if not _within(shape, most):
                axis, excess = max(enumerate(map(int.__sub__, shape, most)), key=lambda found: found[1])
                option = _RAISE.get(INPUTS[name].dims[-1], "--max_batch_size")
                raise EngineError(
                    f"{name} has the shape {list(shape)}, {excess} more along axis {axis} than the engine was built "
                    f"for, {list(most)}; rebuild it with a larger {option}"
                )
        return MIXED

    def _launch(self, profile: int, shapes: tuple[tuple[int, ...], ...], buffers: Mapping[str, Memory]) -> Any:
        """Queue one launch, as a CUDA graph if there is one for these shapes and buffers. Return its context."""
        key = (profile, self.turn, shapes)
        if key in self.captured:
            launch, context = self.captured[key]
            launch()
            return context
        may_capture = profile == GENERATION and self.may_capture and len(self.captured) < _MOST_GRAPHS
        captures = may_capture and key in self.seen
        context = self._context(profile) if captures else self.contexts[profile]
        self._bind(context, shapes, buffers)
        self._enqueue(context)  # TensorRT also requires one such run before a capture
        if captures:
            self._capture(context, key)
        elif may_capture:
            self.seen.add(key)
        return context

    def _bind(self, context: Any, shapes: tuple[tuple[int, ...], ...], buffers: Mapping[str, Memory]) -> None:
        for name, shape in zip(self.graph.inputs, shapes, strict=True):
            if not context.set_input_shape(name, shape):
                raise EngineError(f"{self.graph.file}: TensorRT refuses {name} of shape {list(shape)}")
        for name, memory in buffers.items():
            context.set_tensor_address(name, memory.address)

    def _capture(self, context: Any, key: tuple[Any, ...]) -> None:
        try:
            self.captured[key] = self.cuda.capture(self.stream, lambda: self._enqueue(context)), context
        except DeviceError:
            raise  # the device is lost
        except EngineError as error:
            self.may_capture = False
            logger.warning("%s runs without CUDA graphs: %s", self.graph.file, error)

    def _enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(self.stream):
            self.cuda.check()
            raise EngineError(f"{self.graph.file}: TensorRT did not run the step, its messages say why")


def _widened(history: Tensor, most: int) -> Tensor:
    """Return a history with a number of columns that is a power of two, or `most`, where it has any."""
    columns = history.shape[1]
    wanted = min(max(1 << (columns - 1).bit_length(), _LEAST_HISTORY), most) if columns else 0
    return F.pad(history, (0, wanted - columns), value=-1)


def _within(shape: tuple[int, ...], most: tuple[int, ...]) -> bool:
    return all(size <= top for size, top in zip(shape, most, strict=True))
