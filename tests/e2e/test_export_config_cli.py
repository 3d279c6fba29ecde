"""`trtspec export-config`, run as a person runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.head_checkpoints import make_medusa
from trtspec.build.engine_folder import FORMAT, machine
from trtspec.cli import main
from trtspec.config.speculative import SpeculativeConfig
from trtspec.interop.reading import read_speculative_config

DEMO = Path(__file__).parents[2] / "examples" / "demo"
HEAD = str(DEMO / "eagle3")
EAGLE3 = ("--speculative_decoding_mode", "EAGLE3_ONE_MODEL", "--speculative_model_dir", HEAD, "--max_draft_len", "3")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
NGRAM_YAML = """\
speculative_config:
  decoding_type: "NGram"
  max_draft_len: 3
  max_matching_ngram_size: 3
  is_use_oldest: true
  is_public_pool: false
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `trtspec export-config ARGUMENTS`."""
    status = main(("export-config", *arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def make_engine(folder: Path, speculative: dict[str, Any] | None, draft: str | None = None) -> Path:
    """Write an engine folder's description of itself. No graphs or weights: the command does not read them."""
    facts = {"executables": {}, "files": {}, "build_config": {"backend": "aoti"}, "machine": machine("aoti")}
    folder.mkdir()
    (folder / "target").mkdir()
    (folder / "config.json").write_text(
        json.dumps({"trtspec_engine": FORMAT, "speculative_config": speculative, **facts})
    )
    if draft is not None:
        (folder / "draft").mkdir()
        shutil.copyfile(Path(draft) / "config.json", folder / "draft" / "config.json")
    return folder


def test_tensorrt_llm_yaml_goes_to_stdout_and_warnings_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--to", "tensorrt-llm", *EAGLE3)
    assert status == 0
    assert out == (
        "speculative_config:\n"
        '  decoding_type: "Eagle3"\n'
        "  max_draft_len: 3\n"
        f'  speculative_model: "{HEAD}"\n'
        "  eagle3_one_model: true\n"
        "  eagle3_layers_to_capture: [1, 4, 6]\n"  # [2, 5, 7] in the head's config.json: vLLM's ids
    )
    assert [line.split(":")[:2] for line in err.splitlines()] == [["trtspec", " warning"]]
    assert "draft_sample_method=" in err


def test_vllm_takes_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--to", "vllm", *EAGLE3)
    assert status == 0
    assert len(out.splitlines()) == 1
    assert json.loads(out) == {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3}
    fields = [line.removeprefix("trtspec: warning: ").split("=")[0] for line in err.splitlines()]
    assert fields == ["one_engine", "rejection_sample_method", "draft_sample_method"]


def test_heads_that_are_no_decoder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Heads that are no decoder are recognised by config.json, although it has no field of a decoder's."""
    head = make_medusa(tmp_path, DEMO / "target", num_heads=1)
    spec = json.dumps({"model": str(head), "num_speculative_tokens": 1})
    status, out, _ = run(capsys, "--to", "vllm", "--spec", spec)
    assert (status, json.loads(out)["method"]) == (0, "medusa")
    status, _, err = run(capsys, "--to", "tensorrt-llm", "--spec", spec)
    assert status == 1
    assert "method='medusa' has no equal in TensorRT-LLM; nearest: decoding_type Eagle3" in err


@pytest.mark.parametrize("to", ["tensorrt-llm", "vllm"])
def test_what_is_written_is_read_back_by_us(capsys: pytest.CaptureFixture[str], tmp_path: Path, to: str) -> None:
    yaml = pytest.importorskip("yaml")
    file = tmp_path / "settings"
    assert run(capsys, "--to", to, "--spec", json.dumps(NGRAM), "--output", str(file))[:2] == (0, "")
    read = yaml.safe_load(file.read_text())
    again = read_speculative_config(read["speculative_config"] if to == "tensorrt-llm" else read)
    pool = {"is_public_pool": False} if to == "tensorrt-llm" else {}  # TensorRT-LLM always has a pool
    assert again == SpeculativeConfig(**NGRAM, **pool)


def test_a_file_is_replaced_only_when_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    command = ("--to", "tensorrt-llm", "--spec", json.dumps(NGRAM), "--output", str(file))
    file.write_text("mine")
    status, _, err = run(capsys, *command)
    assert status == 1
    assert err == f"trtspec: --output {file} is there already; replace it with --replace, or give another file\n"
    assert file.read_text() == "mine"
    assert run(capsys, *command, "--replace") == (0, "", "")
    assert file.read_text() == NGRAM_YAML
    assert list(tmp_path.iterdir()) == [file]
    status, _, err = run(capsys, *command[:-1], str(tmp_path), "--replace")
    assert status == 1
    assert "is a folder; give a file" in err


def test_strict_writes_nothing_where_something_differs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    command = ("--strict", "--to", "vllm", "--output", str(file))
    status, out, err = run(capsys, *command, "--spec", json.dumps(NGRAM))
    assert (status, out) == (1, "")
    assert [line.split("=")[0] for line in err.splitlines()] == [
        "trtspec: warning: rejection_sample_method",
        "trtspec: --strict: 1 of these settings have no equal in vllm",
    ]
    assert not file.exists()
    agreed = {**NGRAM, "rejection_sample_method": "standard"}
    assert run(capsys, *command, "--spec", json.dumps(agreed)) == (0, "", "")
    assert json.loads(file.read_text()) == agreed


def test_an_engine_names_the_checkpoint_that_its_draft_was(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The export names the draft's checkpoint. The engine's draft folder has weights packed for trtspec's kernels."""
    stored = {"method": "eagle3", "one_engine": True, "model": HEAD, "num_speculative_tokens": 3}
    engine = make_engine(tmp_path / "engine", stored, HEAD)
    assert run(capsys, str(engine), "--to", "tensorrt-llm") == run(capsys, "--to", "tensorrt-llm", *EAGLE3)

    moved = make_engine(tmp_path / "moved", {**stored, "model": "/gone/head"}, HEAD)
    status, out, err = run(capsys, str(moved), "--to", "tensorrt-llm")
    assert status == 0
    assert '  speculative_model: "/gone/head"\n' in out
    assert "  eagle3_layers_to_capture: [1, 4, 6]\n" in out
    assert "trtspec: warning: model='/gone/head': the engine was built from this folder, which is not here" in err


def test_options_complete_a_decoding_config(capsys: pytest.CaptureFixture[str]) -> None:
    """The draft and K that options name are settings of the decoding config that --spec holds."""
    command = ("--to", "tensorrt-llm", "--spec", '{"decoding_type": "Eagle3"}', *EAGLE3[2:])
    assert run(capsys, *command) == run(capsys, "--to", "tensorrt-llm", *EAGLE3)


def test_an_engine_without_a_draft(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", NGRAM)
    assert run(capsys, str(engine), "--to", "tensorrt-llm") == (0, NGRAM_YAML, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--to", "vllm"), "nothing to export; give an engine folder"),
        (("--to", "vllm", "--speculative_decoding_mode", "NONE"), "nothing to export"),
        ((str(DEMO / "target"), "--to", "vllm"), "is no engine folder"),
        ((str(DEMO / "target"), "--to", "vllm", *EAGLE3), "are both given; give one of them"),
        (
            ("--to", "vllm", "--spec", '{"method": "auto"}'),
            "method='auto' has no equal in vLLM; nearest: method='ngram'",
        ),
        (("--to", "vllm", "--speculative_decoding_mode", "EAGEL"), "is not a speculative decoding mode"),
        (
            ("--to", "vllm", "--speculative_decoding_mode", "NONE", "--speculative_model_dir", HEAD),
            "--speculative_decoding_mode NONE excludes --speculative_model_dir",
        ),
        (
            ("--to", "vllm", *EAGLE3, "--spec", '{"one_engine": false}'),
            "--speculative_decoding_mode EAGLE3_ONE_MODEL with --spec '{\"one_engine\": false}' is mode EAGLE3",
        ),
        (
            ("--to", "vllm", *EAGLE3, "--spec", '{"decoding_type": "Eagle3", "speculative_model_dir": "x"}'),
            "decoding_type, speculative_model given in --spec and as an option of its own; give it once",
        ),
        (("--to", "tensorrt-llm", "--spec", '{"metod": "ngram"}'), "metod"),
        (("--to", "tensorrt-llm", "--spec", '{"method": "ngram"}'), "needs a number; set it"),
        (("--to", "vllm", "--spec", json.dumps(NGRAM), "--output", "no/such/folder/file"), "No such file"),
    ],
)
def test_errors_are_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith("trtspec: ")
    assert words in last
    assert all(line.startswith("trtspec: warning: ") for line in err.splitlines()[:-1])


def test_an_engine_without_speculation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capsys, str(make_engine(tmp_path / "engine", None)), "--to", "vllm")
    assert status == 1
    assert "was built without speculation; there is nothing to export" in err


def test_unknown_servers_are_unusable_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(("export-config", "--to", "sglang", *EAGLE3))
    assert stopped.value.code == 2
    assert "choose from" in capsys.readouterr().err
