"""Write a step's ONNX graphs and, next to them, one file with the weights of all graphs.

backends/onnx/executable.py runs them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnx_ir as ir

from trtspec.backends.compiled import WEIGHTS, CompiledStep, Graph
from trtspec.backends.export import example_for, example_kv
from trtspec.backends.onnx.export import OWN, export_onnx
from trtspec.backends.onnx.linear import as_torch, write_linears
from trtspec.backends.weight_file import save_weight_file
from trtspec.errors import EngineError
from trtspec.methods.step import Step

_INLINE = 1024
"""Largest size in bytes of a constant that stays in its graph's file."""


def require() -> None:
    """Do nothing: the packages that the export needs are imported already."""


def compile_step(
    step: Step,
    block_size: int,
    wanted: Sequence[tuple[int, bool]],
    folder: Path,
    report: Callable[[str], None] = lambda what: None,
    constraints: bool = False,
) -> CompiledStep:
    """Export the graphs of these (K, uniform) of a functional `step` into `folder`, which must exist.

    report: is called with what is being done. constraints: same meaning as in graph_io.input_names.
    """
    models: dict[str, ir.Model] = {}
    graphs = []
    for K, uniform in wanted:
        kind = "uniform" if uniform else "ragged"
        report(f"{kind} graph for K = {K}")
        example = example_for(step, K, block_size, uniform, constraints)
        model = export_onnx(step, example, example_kv(step, example, block_size), uniform)
        write_linears(model)
        file = f"{kind}_k{K}.onnx"
        names = tuple(value.name or "" for value in model.graph.inputs[: -2 * len(step.kv_layers)])
        graphs.append(Graph(file, K, uniform, names))
        models[file] = model
    report("writing weights")
    save_models(models, folder)
    return CompiledStep.of(step, graphs, constraints)


def save_models(models: dict[str, ir.Model], folder: Path) -> None:
    """Write models to their files, and their constants to the safetensors file WEIGHTS, each name once.

    The graphs refer to WEIGHTS as ONNX external data. models: file name -> model; constants of the same name must be
    equal in all models. EngineError if two differ.
    """
    tensors: dict[str, ir.TensorProtocol] = {}
    for model in models.values():
        _name_made_constants(model)
        for name, value in model.graph.initializers.items():
            held = value.const_value
            assert held is not None
            if held.nbytes > _INLINE:
                known = tensors.setdefault(name, held)
                if known is not held and not np.array_equal(known.numpy(), held.numpy()):
                    raise EngineError(f"graphs differ in their constant {name}, and share one set; please report this")
    save_weight_file({name: as_torch(held) for name, held in tensors.items()}, folder / WEIGHTS)
    places = _places(folder / WEIGHTS)
    for file, model in models.items():
        for name, value in model.graph.initializers.items():
            small = cast(ir.TensorProtocol, value.const_value)
            if small.nbytes > _INLINE:  # a small constant may share its name with a large one of another graph
                offset, length = places[name]
                held = tensors[name]
                shape = cast(ir.Shape, held.shape)
                value.const_value = ir.ExternalTensor(
                    WEIGHTS,
                    offset,
                    length,
                    held.dtype,
                    shape=shape,
                    name=name,
                    base_dir=str(folder),
                )
        onnx.save(ir.to_proto(model), folder / file)


def _name_made_constants(model: ir.Model) -> None:
    """Name constants that the exporter made by a hash of their content.

    The exporter numbers them (val_59) anew in every graph.
    """
    constants = model.graph.initializers
    for name, value in list(constants.items()):
        held = value.const_value
        assert held is not None
        if name.startswith(OWN) or held.nbytes <= _INLINE:
            continue
        array = np.ascontiguousarray(held.numpy())
        content = f"{held.dtype.name}{list(array.shape)}".encode() + array.tobytes()
        named = f"made.{hashlib.sha256(content).hexdigest()[:32]}"
        if named not in constants:
            tensor = ir.tensor(array, dtype=held.dtype, name=named)
            model.graph.register_initializer(
                ir.Value(name=named, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            )
        ir.convenience.replace_all_uses_with(value, constants[named])
        del constants[name]


def _places(file: Path) -> dict[str, tuple[int, int]]:
    """Return name -> (offset, number of bytes) of each tensor in a safetensors file."""
    with file.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(size))
    header.pop("__metadata__", None)
    offsets = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (8 + size + first, last - first) for name, (first, last) in offsets.items()}
