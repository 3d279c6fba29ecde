"""The table of backends agrees with the values that configurations allow, and names code that exists."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import make_mimo
from tests.head_checkpoints import make_eagle
from trtspec.backends.table import BACKENDS, COMPILERS, USUAL_COMPILER, Backend
from trtspec.backends.tensorrt.profiles import TensorRTOptions
from trtspec.build.build import build_engine, engine_backend
from trtspec.build.context import plan_context
from trtspec.build.plan import plan_build
from trtspec.build.steps import build_step
from trtspec.config import engine as config
from trtspec.config.engine import EngineConfig
from trtspec.errors import ConfigError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.step import Step

ROWS = BACKENDS.values()


def test_configurations_know_the_names() -> None:
    """The list of names in config equals the table. config may not import backends, so it has its own list."""
    assert tuple(BACKENDS) == config.BACKENDS
    assert all(name == row.name for name, row in BACKENDS.items())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_configurations_know_the_device(row: Backend) -> None:
    EngineConfig(backend=row.name, device=row.device)
    with pytest.raises(ConfigError, match="leave device unset"):
        EngineConfig(backend=row.name, device="cpu" if row.device == "cuda" else "cuda")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_backend_runs_checkpoints_or_engine_folders(row: Backend) -> None:
    assert (row.executable is None) == (row.compiler is None)
    assert row.runs_checkpoints or row.executable is not None
    assert not row.code_for or row.compiler is not None
    assert row.device == "cuda" or not row.torch_gpu


@pytest.mark.parametrize("row", COMPILERS.values(), ids=lambda row: row.name)
def test_the_code_is_there(row: Backend) -> None:
    """The named code exists. Modules are parsed, not imported, as packages that they need may be missing."""
    assert row.executable is not None
    assert row.compiler is not None
    module, _, name = row.executable.partition(":")
    assert name in defined_in(module)
    assert {"require", "compile_step"} <= defined_in(row.compiler)


def defined_in(module: str) -> set[str]:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    tree = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def test_who_compiles_an_engine_folder() -> None:
    assert "eager" not in COMPILERS
    for name in BACKENDS:
        assert engine_backend(EngineConfig(backend=name)).name == (name if name in COMPILERS else USUAL_COMPILER)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_options_of_tensorrt_are_for_its_backends_alone(row: Backend, tmp_path: Path) -> None:
    config, options = EngineConfig(backend=row.name), TensorRTOptions()
    if row.profiles:
        assert engine_backend(config, options) is row
        return
    for make in (
        lambda: plan_build(tmp_path, None, config, options=options),
        lambda: build_engine(tmp_path, tmp_path / "engine", None, config, options=options),
    ):
        with pytest.raises(ConfigError, match=r"built by backend .*; leave them out"):
            make()


@pytest.mark.parametrize("method", ["eagle", "mtp"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_quantised_draft_layers_next_to_the_target_leave_its_weights(row: Backend, method: str, tmp_path: Path) -> None:
    """Quantised draft layers, which share the target's lm_head, leave every weight of the target as it was.

    The target's output does not depend on how its draft is quantised.
    """
    target = make_mimo(tmp_path)
    wishes = {"method": method, "num_speculative_tokens": 1, "one_engine": False, "quantization": "int8"}
    if method == "eagle":
        wishes["model"] = str(make_eagle(tmp_path, target))
    config = EngineConfig(backend=row.name, dtype="float32")
    context = plan_context(target, read_speculative_config(wishes), config, row)
    step = build_step(context.of("target"))
    before = {name: tensor.clone() for name, tensor in held(step).items()}
    draft = build_step(context.of("draft"), step)
    assert any(tensor.dtype == torch.int8 for tensor in held(draft).values())
    after = held(step)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def held(step: Step) -> dict[str, Tensor]:
    return {**dict(step.named_parameters()), **dict(step.named_buffers())}
