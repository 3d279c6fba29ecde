"""Engine folders for a GPU: AOTInductor compiles the same step with fused elementwise work, run as CUDA graphs.

Tests compile and run these graphs for the CPU. On an H100 a step compiled with torch 2.11, but torch crashed when it
loaded the graph. No GPU has tried a newer torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trtspec.backends.aoti.compile import Constants
from trtspec.backends.aoti.executable import load_constants
from trtspec.backends.aoti.graph_compiler import INDUCTOR
from trtspec.backends.aoti.package import load_graph
from trtspec.backends.compiled import CompiledStep, Graph
from trtspec.backends.cuda.device import open_gpu
from trtspec.backends.cuda.executable import CudaExecutable
from trtspec.backends.export import example_for, example_kv, export_step, moved
from trtspec.backends.graph_io import input_names
from trtspec.errors import UnsupportedError
from trtspec.methods.step import Step

FIRST_TORCH = (2, 13)
"""The oldest version that may load a graph. 2.11 ends the process with a segmentation fault; 2.13 was not tried."""


def require() -> None:
    """Raise DependencyError or UnsupportedError if there is no GPU to compile for, or torch may crash there."""
    open_gpu()
    _check_torch()


def _check_torch() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < FIRST_TORCH:
        raise UnsupportedError(
            f"torch {torch.__version__} may crash when it loads a graph that was compiled for a GPU, as 2.11 does; "
            "install torch 2.13 or newer, or run the checkpoint itself, without an engine folder"
        )


def compile_step(
    step: Step,
    block_size: int,
    wanted: Sequence[tuple[int, bool]],
    folder: Path,
    report: Callable[[str], None] = lambda what: None,
    constraints: bool = False,
) -> CompiledStep:
    """Compile graphs as aoti.compile.compile_step does, but for the GPU: whole graphs that call torch's dispatcher."""
    step = step.to(open_gpu())
    constants, graphs = Constants(), []
    for K, uniform in wanted:
        kind = "uniform" if uniform else "ragged"
        report(f"{kind} graph for K = {K}")
        example = moved(example_for(step, K, block_size, uniform, constraints), step.like.device)
        program = export_step(step, example, example_kv(step, example, block_size), uniform)
        graph = Graph(f"{kind}_k{K}.pt2", K, uniform, input_names(step, uniform, constraints=constraints))
        # Inductor would tune kernels on made-up indices, which are out of bounds; so it runs the example instead.
        settings = {**INDUCTOR, "triton.autotune_at_compile_time": False}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = str(folder / graph.file)
            torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=settings)
        constants.add(folder / graph.file, {**program.state_dict, **program.constants})
        graphs.append(graph)
    report("writing weights")
    constants.save(folder)
    return CompiledStep.of(step, graphs, constraints)


class AotiOnCuda(CudaExecutable):
    """AOTInductor graphs that share one copy of the weights on the GPU."""

    def _load(self, folder: Path) -> Mapping[Graph, Callable[[list[Tensor]], list[Tensor]]]:
        _check_torch()
        device = self._work.device
        constants = load_constants(folder)  # an EAGLE3 head may share a tensor with its target
        there = {id(tensor): tensor.to(device) for tensor in constants.values()}
        self._weights = {name: there[id(tensor)] for name, tensor in constants.items()}
        index = -1 if device.index is None else device.index
        return {
            graph: load_graph(folder / graph.file, self._weights, self._flat_kv, alone=True, device=index)
            for graph in self.compiled.graphs
        }
