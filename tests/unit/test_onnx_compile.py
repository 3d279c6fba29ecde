"""Weights of several ONNX graphs are written to one file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

onnx = pytest.importorskip("onnx", reason="pip install 'trtspec[onnx]'")

import onnx_ir as ir  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402

from trtspec.backends.onnx.compile import save_models  # noqa: E402


def test_constants_that_the_exporter_counted_are_told_apart_and_held_once(tmp_path: Path) -> None:
    """Constants of one name that differ are kept apart: val_1 of two graphs.

    Equal constants of two names are stored once.
    """
    a, b = np.arange(512, dtype=np.float32), np.ones(512, np.float32)
    held = {"one.onnx": {"val_1": a, "val_2": a}, "two.onnx": {"val_1": b, "val_2": a}}
    models = {}
    for file, constants in held.items():
        x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [512]) for name in "xy")
        nodes = [helper.make_node("Add", ["x", "val_1"], ["z"]), helper.make_node("Add", ["z", "val_2"], ["y"])]
        initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
        graph = helper.make_graph(nodes, "sum", [x], [y], initializers)
        models[file] = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    save_models(models, tmp_path)
    with safe_open(tmp_path / "weights.safetensors", "np") as weights:
        assert len(list(weights.keys())) == 2
    for file, constants in held.items():
        graph = onnx.load(tmp_path / file).graph
        found = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        for node, array in zip(graph.node, constants.values(), strict=True):
            assert np.array_equal(found[node.input[1]], array)
