"""Compile a step into the graphs and the weights that backends/aoti/executable.py runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trtspec.backends.compiled import WEIGHTS, CompiledStep, Graph
from trtspec.backends.export import example_for, example_kv, export_step, moved
from trtspec.backends.graph_io import input_names
from trtspec.backends.weight_file import save_weights
from trtspec.errors import DependencyError, EngineError
from trtspec.methods.step import Step
from trtspec.ops import graph_calls, kernel_interface

_INDUCTOR = {
    "aot_inductor.package_constants_in_so": False,  # weights once, beside all graphs
    "emulate_precision_casts": True,  # round to bf16 where eager does
    # What is between our ops is a few rows of elementwise work: waking threads for it costs more than it saves.
    "cpp.threads": 1,
}


def require() -> None:
    """DependencyError where there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise DependencyError(
            "compiling an engine needs a C++ compiler; install g++ (apt install g++) or set CXX, or run the checkpoint "
            "as it is (backend eager)"
        ) from error


def compile_step(
    step: Step,
    block_size: int,
    wanted: Sequence[tuple[int, bool]],
    folder: Path,
    report: Callable[[str], None] = lambda what: None,
    edits: bool = False,
) -> CompiledStep:
    """Compile the graphs of these (K, uniform) into `folder` (it must exist), for the device that `step` is on. Those
    for a CPU call its kernels' C functions, others call torch's dispatcher. `report` hears what is being done. edits:
    graphs take edits of logits, and give these."""
    weights: dict[str, Tensor] = {}
    graphs = []
    on_cpu = step.like.device.type == "cpu"
    direct = graph_calls() if on_cpu else {}
    for K, uniform in wanted:
        kind = "uniform" if uniform else "ragged"
        report(f"{kind} graph for K = {K}: tracing")
        example = moved(example_for(step, K, block_size, uniform, edits), step.like.device)
        program = export_step(step, example, example_kv(step, example, block_size), uniform)
        report(f"{kind} graph for K = {K}: compiling")
        file = folder / f"{kind}_k{K}.pt2"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {**_INDUCTOR, "aot_inductor.custom_ops_to_c_shims": direct}
            torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=options)
        constants = {**program.state_dict, **program.constants}
        runner = torch._inductor.aoti_load_package(str(file))
        for name in runner.get_constant_fqns():
            tensor = constants[name].detach()
            if name in weights and not torch.equal(weights[name], tensor):
                raise EngineError(f"graphs differ in their constant {name}, and share one set; please report this")
            weights[name] = tensor
        graphs.append(Graph(file.name, K, uniform, input_names(step, uniform, edits=edits)))
    report("writing weights")
    save_weights(weights, folder / WEIGHTS)
    return CompiledStep.of(step, graphs, edits, kernel_interface() if on_cpu else "")
