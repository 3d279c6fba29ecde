"""The files of a model repository: their content, and input that is refused before any file is written."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import add_tokenizer, make_target
from trtspec import LLM
from trtspec.cli import main
from trtspec.errors import ConfigError, TrtSpecError
from trtspec.serve.triton.configs import LAYOUTS
from trtspec.serve.triton.repo import write_repository
from trtspec.serve.triton.settings import Settings

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("triton-repo"))
    add_tokenizer(folder)
    return folder


def written(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_one_model(target: Path, tmp_path: Path) -> None:
    folders = write_repository(tmp_path / "out", target, NGRAM, max_batch_size=4)
    assert folders == [tmp_path / "out" / "tensorrt_llm"]
    assert written(tmp_path) == [f"out/tensorrt_llm/{name}" for name in ("1/model.py", "1/model.yaml", "config.pbtxt")]
    settings = Settings.read(folders[0] / "1")
    assert settings.llm == {"model": str(target), "max_batch_size": 4, "speculative_config": NGRAM}
    assert settings.cancellation_check_period == 0.1


def test_five_models(target: Path, tmp_path: Path) -> None:
    folders = write_repository(tmp_path / "out", target, layout="classic")
    assert {folder.name for folder in folders} == {
        "ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls",
    }  # fmt: skip
    assert all((folder / "1").is_dir() and (folder / "config.pbtxt").is_file() for folder in folders)
    assert [file for file in written(tmp_path) if file.endswith("model.yaml")] == ["out/tensorrt_llm/1/model.yaml"]
    assert "out/ensemble/1/model.py" not in written(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_py_hands_on_a_class_of_ours(target: Path, tmp_path: Path, layout: str) -> None:
    for folder, spec in zip(write_repository(tmp_path / "out", target, layout=layout), LAYOUTS[layout], strict=True):
        if spec.python_class:
            names: dict[str, Any] = {}
            exec((folder / "1" / "model.py").read_text(), names)
            module, _, name = spec.python_class.rpartition(".")
            assert names["TritonPythonModel"] is getattr(importlib.import_module(module), name)
            assert names["TritonPythonModel"].spec is spec


def test_paths_are_absolute(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(target.parent)
    draft = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 2}
    [folder] = write_repository(tmp_path / "out", target.name, draft, tokenizer=target.name)
    llm = Settings.read(folder / "1").llm
    assert llm["model"] == llm["tokenizer"] == str(target)
    assert llm["speculative_config"]["model"] == str(target.parent / "draft")


@pytest.mark.parametrize(
    ("speculation", "field"),
    [
        ({"method": "extract_hidden_states", "output_directory": "shards"}, "output_directory"),
        ({"decoding_type": "Eagle3", "speculative_model": "shards", "max_draft_len": 2}, "speculative_model"),
        ({"decoding_type": "Eagle3", "speculative_model_dir": "shards", "max_draft_len": 2}, "speculative_model_dir"),
    ],
)
def test_so_are_all_folders_of_speculation(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any], field: str
) -> None:
    monkeypatch.chdir(tmp_path)
    [folder] = write_repository("out", target, speculation)
    kept = Settings.read(folder / "1").llm["speculative_config"]
    assert kept == {**speculation, field: str(tmp_path / "shards")}


@pytest.mark.parametrize("name", ["ngram", "[ngram]", "suffix"])
def test_names_of_methods_are_no_folders(target: Path, tmp_path: Path, name: str) -> None:
    """Names of methods are not made into paths; vLLM writes model: "[ngram]"."""
    speculation = {"model": name, "num_speculative_tokens": 3}
    if name == "suffix":
        speculation["method"] = name
    [folder] = write_repository(tmp_path / "out", target, speculation)
    kept = Settings.read(folder / "1").llm["speculative_config"]
    assert kept == speculation
    with LLM(target, kept, num_kv_blocks=64) as llm:  # as the server loads it
        assert llm.generate([[1, 2]], use_tqdm=False)


def test_an_empty_folder_is_filled_and_another_kept(target: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_repository(tmp_path / "out", target)
    with pytest.raises(ConfigError, match="is there already"):
        write_repository(tmp_path / "out", target, layout="classic")
    assert written(tmp_path) == [f"out/tensorrt_llm/{name}" for name in ("1/model.py", "1/model.yaml", "config.pbtxt")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "other"}, "layout = 'other'; use one of llmapi, classic"),
        ({"speculative_config": {"method": "nonsense"}}, "nonsense"),
        ({"max_batch_size": 0}, "max_batch_size = 0"),
        ({"tokenizer": "/nowhere"}, "/nowhere has no tokenizer.json"),
    ],
)
def test_what_is_refused_writes_nothing(target: Path, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TrtSpecError, match=message):
        write_repository(tmp_path / "out", target, **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: 3", "model = 3; give the folder"),
        ("[1]", "holds a list, not a mapping"),
        ("a: [", "cannot be read"),
        ("model: x\ntriton_config: {other: 1}", "it may hold cancellation_check_period_ms alone"),
        ("model: x\ntriton_config: {cancellation_check_period_ms: 0}", "cancellation_check_period_ms = 0 must be"),
    ],
)
def test_a_model_yaml_that_cannot_be_meant(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        Settings.read(tmp_path)


def test_command_line(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    options = ["--model", str(target), "--output-dir", str(out), "--spec-method", "ngram", "--spec-tokens", "2"]
    more = ["--max-batch-size", "3", "--no-streaming", "--generation-config", "off"]
    assert main(["triton-repo", *options, *more]) == 0
    assert capsys.readouterr().out == f"{out / 'tensorrt_llm'}\n"
    llm = Settings.read(out / "tensorrt_llm" / "1").llm
    assert (llm["max_batch_size"], llm["generation_config"]) == (3, "off")
    assert llm["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 2}
    assert "decoupled: false" in (out / "tensorrt_llm" / "config.pbtxt").read_text()
    assert main(["triton-repo", *options]) == 1
    assert "is there already" in capsys.readouterr().err
