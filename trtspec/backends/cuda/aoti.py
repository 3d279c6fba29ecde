"""Engine folders for a GPU: AOTInductor's graphs of the same step, whose elementwise work is fused, run as CUDA graphs.

Tests compile and run them for the CPU alone: they do not show that a step compiles for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trtspec.backends.aoti import compile
from trtspec.backends.aoti.executable import load_graph
from trtspec.backends.compiled import WEIGHTS, CompiledStep, Graph
from trtspec.backends.cuda.device import open_gpu
from trtspec.backends.cuda.executable import CudaExecutable
from trtspec.backends.weight_file import load_weights
from trtspec.methods.step import Step


def require() -> None:
    """DependencyError or UnsupportedError where there is no GPU to compile for."""
    open_gpu()


def compile_step(
    step: Step,
    block_size: int,
    wanted: Sequence[tuple[int, bool]],
    folder: Path,
    report: Callable[[str], None] = lambda what: None,
    edits: bool = False,
) -> CompiledStep:
    """As aoti.compile.compile_step, for the GPU."""
    return compile.compile_step(step.to(open_gpu()), block_size, wanted, folder, report, edits)


class AotiOnCuda(CudaExecutable):
    """AOTInductor graphs, whose weights lie on the GPU once for all of them."""

    def _load(self, folder: Path) -> Mapping[Graph, Callable[[list[Tensor]], list[Tensor]]]:
        device = self._work.device
        self._weights = {name: tensor.to(device) for name, tensor in load_weights(folder / WEIGHTS).items()}
        index = -1 if device.index is None else device.index
        return {
            graph: load_graph(folder / graph.file, self._weights, self._flat_kv, alone=True, device=index)
            for graph in self.compiled.graphs
        }
