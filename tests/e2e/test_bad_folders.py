"""Folders that are no checkpoint, or a damaged one. The error names the folder and the remedy, in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import edit_tensors
from tests.e2e.refused import KINDS, Folders, assert_refused, head
from trtspec import LLM
from trtspec.errors import CheckpointError, TrtSpecError, WeightsError


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def stored_as(dtype: torch.dtype) -> Callable[[Path], None]:
    def convert(folder: Path) -> None:
        edit_tensors(folder, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))

    return convert


DAMAGES: dict[str, tuple[Callable[[Path], object], type[TrtSpecError], tuple[str, ...]]] = {
    "no such folder": (
        shutil.rmtree,
        CheckpointError,
        ("is not a folder on this machine", "pass the folder"),
    ),
    "no config.json": (lambda f: (f / "config.json").unlink(), CheckpointError, ("config.json is missing", "pass a")),
    "a config.json that is no JSON": (
        lambda f: (f / "config.json").write_text("{ model"),
        CheckpointError,
        ("config.json is not readable JSON", "download the file again"),
    ),
    "a config.json that is a list": (
        lambda f: (f / "config.json").write_text("[1]"),
        CheckpointError,
        ("config.json holds a list", "download it again"),
    ),
    "a truncated safetensors file": (
        truncate,
        CheckpointError,
        ("model.safetensors is damaged or truncated", "download or copy it again"),
    ),
    "an empty safetensors file": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        CheckpointError,
        ("model.safetensors is damaged or truncated", "download or copy it again"),
    ),
    "integers for weights": (
        stored_as(torch.int32),
        WeightsError,
        (" is stored as I32", "says nothing of quantised weights", "use a checkpoint in F64, F32, F16, BF16"),
    ),
    "fp8 weights without their scales": (
        stored_as(torch.float8_e4m3fn),
        WeightsError,
        (" is stored as F8_E4M3", "says nothing of quantised weights", "or its own config.json"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_draft(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, kind: str
) -> None:
    damage, error, words = DAMAGES[how]
    folder = head(folders, kind)
    damage(folder)
    spec = {"method": kind, "model": str(folder), "num_speculative_tokens": 2}
    assert_refused(folders.target, spec, error, (*words, "draft", str(folder)), tmp_path, capsys)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_target(folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    damage, error, words = DAMAGES[how]
    folder = folders.copy(folders.target)
    damage(folder)
    assert_refused(folder, None, error, (*words, "target", str(folder)), tmp_path, capsys)


@pytest.mark.parametrize("how", [how for how in DAMAGES if "weights" in how])
def test_damaged_mtp_layers(folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    damage, error, words = DAMAGES[how]
    folder = folders.copy(folders.mimos[1])
    kept: dict[str, Tensor] = {}
    edit_tensors(folder, lambda tensors: kept.update(tensors))
    damage(folder)
    own = {name: tensor for name, tensor in kept.items() if "mtp_layers" not in name}
    edit_tensors(folder, lambda tensors: tensors.update(own))  # only the modules' tensors have another dtype
    assert_refused(folder, {"method": "mtp"}, error, (*words, "MTP weights in"), tmp_path, capsys)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_floats_of_another_width_are_no_mistake(folders: Folders, kind: str, dtype: torch.dtype) -> None:
    """Checkpoints in floats of another width are converted, whatever config.json says of their dtype."""
    folder = head(folders, kind)
    edit_tensors(folder, lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items()}))
    LLM(folders.target, {"method": kind, "model": str(folder), "num_speculative_tokens": 2}).shutdown()
