"""The builder's plugins from TensorRT's own registry, and the errors on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

trt = pytest.importorskip("tensorrt", reason="TensorRT is not installed here: make contract-tensorrt")

from trtspec_plugins.tensorrt.signatures import PLUGINS  # noqa: E402

import trtspec.ops  # noqa: E402, F401  (defines the ops)
from trtspec.backends.tensorrt.compile import registered_plugins, require  # noqa: E402
from trtspec.errors import DependencyError  # noqa: E402

ATTRIBUTES: Mapping[str, Mapping[str, int | float]] = {
    "SpecAttention": {"window": 7, "scale": 0.25, "softcap": 30.0},  # not in the plugin's order
    "SpecAttentionChained": {"window": 7, "scale": 0.25, "softcap": 30.0},
    "QuantizeGroups": {"group": 128},
    "GroupsLinear": {"bits": 4},
}


@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "KvCompact"])
def test_the_registry_makes_each_plugin_with_its_attributes(name: str) -> None:
    signature, attributes = PLUGINS[name], ATTRIBUTES.get(name, {})
    plugin, order = registered_plugins(trt)(signature.op, signature.inputs, attributes, signature.aliases)
    assert order == signature.inputs
    assert plugin.attrs == dict(attributes)
    assert isinstance(plugin, trt.IPluginV3)
    form = type(plugin).__name__.lower()
    assert "aot" in form


def test_without_a_driver_the_machine_with_the_gpu_is_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(DependencyError, match=r"no NVIDIA driver here|finds no GPU"):
        require()


def test_an_op_without_a_plugin_for_its_inputs_is_named() -> None:
    make: Any = registered_plugins(trt)
    with pytest.raises(LookupError, match=r"no TensorRT plugin for SpecSample\(logits\)"):
        make("SpecSample", ["logits"], {}, False)
