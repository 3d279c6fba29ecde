"""Modes that a target or a backend cannot run, and the same modes on a target that can."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.refused import Folders, assert_refused
from tests.e2e.tiny import MASK
from trtspec.build.plan import plan_build
from trtspec.cli import main
from trtspec.config.engine import EngineConfig
from trtspec.errors import UnsupportedError
from trtspec.interop.reading import read_speculative_config
from trtspec.modes import SpeculativeDecodingMode as M
from trtspec.modes import words_for

# -- modes on a target that is not dense -------------------------------------------------------------------------------

MODES = [mode for mode in M if mode is not M.NONE]


def asked_for(mode: M, folders: Folders) -> dict[str, Any]:
    """A speculative_config of this mode that is right for `folders.target`."""
    words, K = words_for(mode), {"num_speculative_tokens": 2}
    models: dict[M, Callable[[], dict[str, Any]]] = {
        M.USER_PROVIDED: lambda: {"drafter": "examples.custom_drafter:SuccessorDrafter", **K},
        M.SAVE_HIDDEN_STATES: lambda: {"output_directory": str(folders.tmp / "states"), "capture_layers": [0]},
        M.DRAFT_TARGET: lambda: {"model": str(folders.draft), **K},
        M.DRAFT_TARGET_ONE_MODEL: lambda: {"model": str(folders.draft), **K},
        M.PARD: lambda: {"model": str(folders.copy(folders.draft, pard_token=MASK)), **K},
        M.EAGLE: lambda: {"model": folders.eagle(), **K},
        M.EAGLE_ONE_MODEL: lambda: {"model": folders.eagle(), **K},
        M.EAGLE3: lambda: {"model": folders.eagle3(), **K},
        M.EAGLE3_ONE_MODEL: lambda: {"model": folders.eagle3(), **K},
        M.P_EAGLE: lambda: {"model": folders.eagle3(mask=MASK), **K},
        M.DFLASH: lambda: {"model": folders.dflash(), **K},
        M.DSPARK: lambda: {"model": folders.dspark(), **K},
        M.MEDUSA: lambda: {"model": folders.medusa(), **K},
        M.MLP_SPECULATOR: lambda: {"model": folders.mlp(), **K},
    }
    return {**words, **(models[mode]() if mode in models else K)}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_target_that_is_not_dense(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: M
) -> None:
    """Every mode is refused on a target that is not dense, although the speculation itself is right."""
    spec = asked_for(mode, folders)
    experts = folders.copy(folders.target, architectures=["MixtralForCausalLM"], model_type="mixtral")
    words = ("architecture 'MixtralForCausalLM'", str(experts), "supported: LlamaForCausalLM, MistralForCausalLM")
    assert_refused(experts, spec, UnsupportedError, words, tmp_path, capsys)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.traits.method != "mtp"], ids=lambda mode: mode.name)
def test_the_same_on_a_dense_target_is_planned(folders: Folders, mode: M) -> None:
    """The same speculation is planned on a dense target, so the test above refuses the target and nothing else."""
    spec = read_speculative_config(asked_for(mode, folders))
    assert plan_build(folders.target, spec, EngineConfig()).mode in (mode.name, "NGRAM")  # AUTO chooses NGRAM


# -- modes that a backend cannot run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "backend"), [(M.DFLASH, "onnx"), (M.DSPARK, "onnx"), (M.DFLASH, "tensorrt"), (M.MTP, "tensorrt")]
)
def test_a_mode_that_a_backend_cannot_run(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: M, backend: str
) -> None:
    """`trtspec build --dry_run` refuses the mode, as the build does before it loads anything."""
    spec: dict[str, Any] = asked_for(mode, folders)
    target = folders.mimos[2] if mode is M.MTP else folders.target
    remedy = "num_speculative_tokens=1" if mode is M.MTP else "use another backend"
    arguments = ["build", "--checkpoint_dir", str(target), "--output_dir", str(tmp_path / "engine")]
    arguments += ["--backend", backend, "--spec", json.dumps(spec), "--dry_run"]
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trtspec: ")
    assert remedy in line
    assert backend in line
