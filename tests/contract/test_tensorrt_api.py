"""Every name of TensorRT's API in the sources exists, in the version that the backend is written for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

trt = pytest.importorskip("tensorrt", reason="TensorRT is not installed here: make contract-tensorrt")

from tests.contract.api_names import parameters, problems, uses  # noqa: E402
from tests.contract.record_api import FILE, record, text  # noqa: E402

ROOT = Path(__file__).parents[2]
SOURCES = [file for folder in ("trtspec", "plugins") for file in sorted((ROOT / folder).rglob("*.py"))]
HEAD = "import tensorrt as trt\nimport tensorrt.plugin as trtp\n"


def test_every_name_and_keyword_of_the_sources_exists() -> None:
    assert sum(uses(file.read_text(encoding="utf-8")) for file in SOURCES) > 20
    wrong = [
        f"{file.relative_to(ROOT)}, {problem}" for file in SOURCES for problem in problems(file.read_text("utf-8"))
    ]
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        "flags = 1 << int(trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS)",
        "import tensorrt\ntensorrt.plugin.register('a::b', lazy_register=True)",
        "from tensorrt.plugin import TensorDesc\nTensorDesc",
        "builder = trt.Builder(trt.Logger(trt.Logger.WARNING))\n"
        "config = builder.create_builder_config()\n"
        "config.set_preview_feature(feature=trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, enable=True)",
        "def f(network: trt.INetworkDefinition):\n    network.add_input(name='x', dtype=trt.int32, shape=(1,))",
        "trtp.AutoTuneCombination(io_types='FP32', layouts='LINEAR')",
        "def f(trtp):\n    return trtp.whatever",
    ],
)
def test_right_code_passes(code: str) -> None:
    assert problems(HEAD + code) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH", "NetworkDefinitionCreationFlag has no EXPLICIT_BATCH"),
        ("trt.BuilderFlag.FP16", "BuilderFlag has no FP16"),
        ("trtp.regster('a::b')", "has no regster"),
        ("from tensorrt.plugin import TensorDescription", "tensorrt.plugin has no TensorDescription"),
        ("trtp.register('a::b', lazy=True)", "takes no lazy"),
        ("trt.PluginField(nom='x')", "takes no nom"),
        ("b = trt.Builder(trt.Logger())\nb.build_cuda_engine(1)", "Builder has no build_cuda_engine"),
        (
            "b = trt.Builder(trt.Logger())\nc = b.create_builder_config()\nc.max_workspace_size = 1",
            "IBuilderConfig has no max_workspace_size",
        ),
        ("def f(network: trt.INetworkDefinition):\n    network.add_input(nom='x')", "takes no nom"),
        ("trt.Builder(trt.Logger()).create_network(3).add_nothing()", "INetworkDefinition has no add_nothing"),
    ],
)
def test_a_mistake_is_found(code: str, said: str) -> None:
    [problem] = problems(HEAD + code)
    assert said in problem


def test_what_methods_take_is_read_from_their_docstrings() -> None:
    assert {"self", "name", "dtype", "shape"} in (parameters(trt.INetworkDefinition.add_input) or [])


def test_the_recorded_api_is_that_of_these_bindings() -> None:
    """The record from which the stand-in for TensorRT is made has TensorRT's methods, parameters and properties."""
    if os.environ.get("TRTSPEC_RECORD"):
        FILE.write_text(text(record()), encoding="utf-8")
    assert json.loads(FILE.read_text(encoding="utf-8")) == record()
