"""Compile a step into the graphs and the weights that backends/aoti/executable.py runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from trtspec.backends.aoti.cut import (
    blocks_of,
    export_block,
    export_epilogue,
    gives_all_streams,
    lookup_of,
    read_layers,
    tensors_of,
)
from trtspec.backends.aoti.graph_compiler import GraphCompiler
from trtspec.backends.compiled import CONSTANTS, WEIGHTS, Block, CompiledStep, Graph, Lookup
from trtspec.backends.export import example_for, example_kv, export_step
from trtspec.backends.graph_io import input_names, layer_inputs
from trtspec.backends.weight_file import save_weight_file
from trtspec.errors import DependencyError, EngineError
from trtspec.methods.step import DecodeStep, Step
from trtspec.models.attention import as_ops
from trtspec.ops import graph_calls, kernel_interface

OF_DECODER = "step.decoder."
OF_TABLES = "step.decoder.rotary."  # tables whose length depends on max_seq_len

Report = Callable[[str], None]


def require() -> None:
    """Raise DependencyError if there is no C++ compiler."""
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
    report: Report = lambda what: None,
    constraints: bool = False,
) -> CompiledStep:
    """Compile the graphs of these (K, uniform) into `folder`, which must exist.

    All graphs are ragged if the decoder is cut. Graphs call the kernels' C functions if these are built, else torch's
    dispatcher. report: is called with what is being done. constraints: graphs take constraints on the logits and return
    the logits.
    """
    programs: dict[str, ExportedProgram] = {}
    direct = graph_calls()
    if direct:  # kernels take less time than Inductor's loops
        as_ops(step)
    with GraphCompiler(direct) as compiler:

        def add(program: ExportedProgram, file: str) -> None:
            programs[file] = program
            compiler.add(program, folder / file)

        blocks, graphs = blocks_of(step), []
        for K, uniform in wanted:
            kind = "uniform" if uniform else "ragged"
            report(f"{kind} graph for K = {K}")
            example = example_for(step, K, block_size, uniform, constraints)
            names, kv = input_names(step, uniform, constraints=constraints), example_kv(step, example, block_size)
            graph = Graph(f"{kind}_k{K}.pt2", K, uniform, names)
            if isinstance(step, DecodeStep) and blocks:
                own = [name for name in layer_inputs(names, step.tree is not None) if name not in names]
                graph = replace(graph, inputs=(*own, *names))
                add(export_epilogue(step, example, names, kv), graph.file)
            else:
                add(export_step(step, example, kv, uniform), graph.file)
            graphs.append(graph)
        lookup = _add_blocks(step, blocks, block_size, constraints, add, report)
        report("compiling")
    report("writing weights")
    constants = Constants()
    for graph in graphs:
        constants.add(folder / graph.file, {**programs[graph.file].state_dict, **programs[graph.file].constants})
    read: tuple[int, ...] = ()
    if isinstance(step, DecodeStep) and blocks:
        read, of_step = read_layers(step), tensors_of(step)
        constants.tensors |= {name: of_step[name] for name in vars(lookup).values() if name in of_step}
        for block in blocks:
            constants.add(folder / block.file, of_step, block.whole_name)
    constants.save(folder)
    return CompiledStep.of(step, graphs, constraints, kernel_interface(), lookup, blocks, read)


def _add_blocks(
    step: Step,
    blocks: Sequence[Block],
    block_size: int,
    constraints: bool,
    add: Callable[[ExportedProgram, str], None],
    report: Report,
) -> Lookup | None:
    """Add the graphs of layers and return the lookup before them; None if the decoder is not cut."""
    if not isinstance(step, DecodeStep) or not blocks:
        return None
    names, K = input_names(step, constraints=constraints), 0 if step.tree is None else step.tree.tree.num_nodes
    example = example_for(step, K, block_size, False, constraints)
    if step.tree is not None:
        example = step.tree.with_ancestors(example, step.tree.ancestors(example))
    kv = example_kv(step, example, block_size)
    for block in {block.file: block for block in reversed(blocks)}.values():  # the first block of each file
        report(f"graph of {block.count} layers")
        add(export_block(step, example, names, kv, block, gives_all_streams(step, blocks)), block.file)
    return lookup_of(step)


class Constants:
    """The constants of all graphs of a step, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def add(self, file: Path, tensors: Mapping[str, Any], name_of: Callable[[str], str] = str) -> None:
        """Add the constants of the graph in `file`. name_of: maps a constant's name to its name in `tensors`."""
        for own in torch._inductor.aoti_load_package(str(file)).get_constant_fqns():
            self.hold(name_of(own), tensors[name_of(own)].detach())

    def hold(self, name: str, tensor: Tensor) -> None:
        """Add one constant. EngineError if there is a different constant of the same name."""
        held = self.tensors.setdefault(name, tensor)
        if held.data_ptr() != tensor.data_ptr() and not torch.equal(held, tensor):
            raise EngineError(f"graphs differ in their constant {name}, and share one set; please report this")

    def save(self, folder: Path) -> None:
        """Write the constants to the two files that executable.load_constants reads."""
        files: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, CONSTANTS: {}}
        for name, tensor in self.tensors.items():
            shared = name.startswith(OF_DECODER) and not name.startswith(OF_TABLES)
            files[WEIGHTS if shared else CONSTANTS][name] = tensor
        save_weight_file(files[WEIGHTS], folder / WEIGHTS)
        save_weight_file(files[CONSTANTS], folder / CONSTANTS, files[WEIGHTS])
