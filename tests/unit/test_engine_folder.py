"""Engine folders as files: where they may be written, and the errors for damaged ones. Nothing is compiled here."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import make_mimo
from trtspec.backends.table import BACKENDS
from trtspec.backends.weight_file import load_weight_file, save_weight_file
from trtspec.build.build import _publish, refuse_taken
from trtspec.build.context import plan_context
from trtspec.build.engine_folder import FORMAT, EngineFolder, machine
from trtspec.config.engine import EngineConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.kv.memory import huge_pages
from trtspec.methods.planning import choose
from trtspec.methods.table import METHODS

WHOLE: dict[str, Any] = {
    "trtspec_engine": FORMAT,
    "machine": machine("aoti"),
    "build_config": {"backend": "aoti"},
    "executables": {},
    "files": {"a": {"size": 1, "sha256": ""}},
}


def engine(folder: Path, **changes: Any) -> Path:
    """Write the config.json of an engine, and an empty folder for its target."""
    (folder / "target").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**WHOLE, **changes}))
    return folder


# -- writing an engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"trtspec_engine": FORMAT - 1}, {"files": None}], ids=["new", "old", "damaged"]
)
def test_engines_of_every_state_can_be_replaced_and_are_asked_about(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = engine(tmp_path / "engine", **changes)
    refuse_taken(folder, replace_existing=True)
    with pytest.raises(ConfigError, match=r"holds an engine; .* replace it with --replace"):
        refuse_taken(folder, replace_existing=False)


def test_what_is_no_engine_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    for taken in (tmp_path / "notes", tmp_path / "notes" / "thesis.txt"):
        with pytest.raises(ConfigError, match="is no engine; choose another"):
            refuse_taken(taken, replace_existing=True)
    refuse_taken(tmp_path / "free", replace_existing=False)


def test_folders_that_cannot_be_moved_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for fixed in (tmp_path, Path("/")):
        with pytest.raises(ConfigError, match="cannot be replaced by a new folder"):
            refuse_taken(fixed, replace_existing=True)


def staged(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    staging = engine(tmp_path / "scratch" / "engine")
    (staging / "new").touch()
    return staging


@pytest.mark.parametrize("before", [lambda f: None, Path.mkdir, engine], ids=["free", "empty", "engine"])
def test_the_new_engine_takes_the_place(tmp_path: Path, before: Callable[[Path], object]) -> None:
    before(tmp_path / "out")
    _publish(staged(tmp_path), tmp_path / "out", replace_existing=True)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "new", "target"]


def test_what_came_meanwhile_stays_and_so_does_the_engine(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"could not be written .*; the engine is in (.*)$") as raised:
        _publish(staged(tmp_path), tmp_path / "out", replace_existing=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"
    assert (Path(str(raised.value).rsplit(" in ", 1)[1]) / "new").exists()


def test_the_old_engine_comes_back_where_the_new_one_cannot_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, staging, rename = engine(tmp_path / "out"), staged(tmp_path), os.rename

    def failing(source: Path, target: Path) -> None:
        if (source, target) == (staging, old):
            raise OSError("the disk is gone")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(ConfigError, match="the disk is gone"):
        _publish(staging, old, replace_existing=True)
    assert sorted(file.name for file in old.iterdir()) == ["config.json", "target"]


# -- running an engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "device", "other"), [("cuda", "cuda", "cpu"), ("aoti", "cpu", "cuda")])
def test_the_device_is_the_backend_s_whatever_was_said_when_it_was_built(
    tmp_path: Path, backend: str, device: str, other: str
) -> None:
    for said in ({}, {"device": "auto"}, {"device": device}):
        built = EngineFolder(tmp_path, {"build_config": {"backend": backend, **said}})
        assert built.engine_config({"device": device}).device == device
        assert built.engine_config({"device": "auto"}).device == "auto"
        with pytest.raises(ConfigError, match=f"device = '{other}', and backend '{backend}' runs on the"):
            built.engine_config({"device": other})


@pytest.mark.parametrize("method", [None, "mtp"])
def test_layers_that_came_with_the_target_are_read_in_the_engine(tmp_path: Path, method: str | None) -> None:
    """Layers that came with the target are read from the engine's folder. The folder that the config names is gone."""
    engine(tmp_path)
    make_mimo(tmp_path, name="target")
    named = {"model": "/gone", "num_speculative_tokens": 1} | ({} if method is None else {"method": method})
    built = EngineFolder(tmp_path, {"speculative_config": named})
    context = plan_context(built, None, EngineConfig(backend="aoti"), BACKENDS["aoti"])
    assert (context.speculation.method, context.draft) == ("mtp", None)
    assert context.speculation.model == str(tmp_path / "target")
    assert context.folders == (tmp_path / "target",)


def test_a_draft_that_is_in_the_engine_has_no_revision(tmp_path: Path) -> None:
    """The user named a commit on the Hub. The engine has a folder with its files."""
    engine(tmp_path)
    named = {"method": "eagle3", "model": "some/head", "revision": "abc", "num_speculative_tokens": 2}
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    config = EngineFolder(tmp_path, {"speculative_config": named}).speculative_config()
    assert config is not None
    assert (config.model, config.revision) == (str(tmp_path / "draft"), None)


@pytest.mark.parametrize(
    "fields", [{"model": "[ngram]"}, {"method": "ngram", "model": "ngram"}, {"method": "ngram"}], ids=str
)
def test_a_name_that_is_no_folder_stays_none_in_an_engine(tmp_path: Path, fields: dict[str, str]) -> None:
    config = EngineFolder(
        tmp_path, {"speculative_config": {**fields, "num_speculative_tokens": 2}}
    ).speculative_config()
    assert config is not None
    assert choose(config, None) == (METHODS["ngram"], None)


# -- damaged engines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": None}, "lacks machine"),
        ({"executables": None}, "lacks executables"),
        ({"files": [1]}, "lacks files"),
        ({"files": {"x": {}}}, "is damaged; copy it again"),
        ({"files": {"x": 1}}, "is damaged; copy it again"),
        ({"machine": {}}, "is damaged; copy it again"),
        ({"build_config": {"backend": "vulkan"}}, "is of backend 'vulkan', which this version of trtspec does not run"),
        ({"build_config": {"backend": "onnx"}, "machine": {}}, "is damaged; copy it again"),
        ({"executables": {"target": 1}}, "is damaged; copy it again"),
    ],
    ids=str,
)
def test_a_config_that_is_not_whole_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        EngineFolder.open(engine(tmp_path, **changes))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[1]",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}',
        b'{"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}',
        b'{"__metadata__": {"elsewhere": "[1]"}}',
    ],
)
def test_weights_with_a_damaged_header_are_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"has a damaged header .* rebuild the engine"):
        load_weight_file(file)


def test_weights_of_all_kinds_come_back(tmp_path: Path) -> None:
    """Tensors without elements, shared tensors, parts of others and strided tensors are loaded as they were saved."""
    base = torch.arange(12.0).view(3, 4)
    tensors = {"none": torch.empty(0, 3), "base": base, "same": base, "part": base[1:], "turned": base.t()}
    save_weight_file(tensors, tmp_path / "weights.safetensors")
    loaded = load_weight_file(tmp_path / "weights.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)


def test_a_tensor_that_the_shared_file_has_is_written_and_held_once(tmp_path: Path) -> None:
    """A tensor that the shared file has is written and held once.

    A part of it, a copy, or another view of the same memory is another tensor. So is a tensor without elements.
    """
    matrix, none = torch.randn(16, 16), torch.empty(0)
    shared = {"theirs": matrix, "none": none}
    others = {"part": matrix[:8], "turned": matrix.t(), "copy": matrix.clone(), "nothing": none}
    file = tmp_path / "constants.safetensors"
    save_weight_file({"same": matrix, **others}, file, shared)
    assert load_file(file).keys() == others.keys()
    loaded = load_weight_file(file, shared)
    assert loaded["same"] is matrix
    assert all(torch.equal(loaded[name], tensor) for name, tensor in others.items())
    with pytest.raises(CheckpointError, match="names theirs, which no other file of it has; rebuild the engine"):
        load_weight_file(file, {"none": none})


def test_whoever_may_read_a_folder_may_read_its_weights(tmp_path: Path) -> None:
    """Files of weights are readable for all: one user builds an engine, and another, a container's, serves it."""
    save_weight_file({"some": torch.ones(3)}, tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone gives huge pages")
def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # a value that no kernel knows
    memory = huge_pages(1 << 20)
    assert not any(memory[:4096])
