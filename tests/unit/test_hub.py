"""Models by their names on a Hub: the files that are fetched, those that are not, and the errors.

huggingface_hub reads its settings when it is imported, so every case is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.unit.hub_endpoint import COMMIT, Hub, serving
from tests.unit.tokenizer_kinds import byte_level
from trtspec.config.checkpoint.folder import read_checkpoint
from trtspec.errors import CheckpointError, ConfigError
from trtspec.hub.folders import checkpoint_folder
from trtspec.models.weights import weight_files

pytestmark = pytest.mark.slow

ASK = """
import json, sys
from trtspec.errors import TrtSpecError
from trtspec.hub.folders import checkpoint_folder, lasting_path
found = []
for name, revision in json.loads(sys.argv[1]):
    try:
        folder, path = (of(name, revision=revision) for of in (checkpoint_folder, lasting_path))
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        found.append({"folder": str(folder), "files": files, "path": str(path)})
    except TrtSpecError as error:
        found.append({"error": type(error).__name__, "says": str(error)})
print(json.dumps(found))
"""
RUN = """
import json, sys
from trtspec import LLM, SamplingParams
from trtspec.serve.triton.repo import write_repository
from trtspec.serve.triton.settings import Settings
draft = {"method": "draft_model", "model": "some/draft", "revision": "old", "num_speculative_tokens": 2}
llm = LLM("some/model", draft, revision="main", backend="eager")
(output,) = llm.generate("def", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
(folder,) = write_repository(sys.argv[1], "some/model", draft, revision="main", backend="eager")
print(json.dumps({
    "ids": list(output.outputs[0].token_ids), "accepted": output.acceptance_length,
    "served": Settings.read(folder / "1").llm,
}))
"""
WEIGHTS = save({"model.norm.weight": torch.ones(50_000)})
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "additional_chat_templates/tools.jinja": b"tools",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "modeling_llama.py": b"code",
    "training_args.pt": b"pickle",
    "onnx/model.safetensors": WEIGHTS,
    "onnx/config.json": b"{}",
    "README.md": b"words",
    "model.Q4_0.gguf": b"GGUF",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub()) as found:
        found.add("some/model", FILES)
        yield found


def ask(hub: Hub, home: Path, name: str = "some/model", revision: str | None = None, **variables: str) -> Any:
    (found,) = ask_all(hub, home, [(name, revision)], **variables)
    return found


def ask_all(hub: Hub, home: Path, asked: list[tuple[str, str | None]], **variables: str) -> list[Any]:
    """Ask for models, each with its revision, one after another in one process."""
    return run(hub, home, [ASK, json.dumps(asked)], **variables)  # type: ignore[no-any-return]


def run(hub: Hub, home: Path, command: list[str], **variables: str) -> Any:
    """Run a Python program and return the JSON value of its last line."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRTSPEC_CACHE": str(home / "cache"),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", *command], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_only_what_a_model_is_made_of_is_fetched(hub: Hub, tmp_path: Path) -> None:
    """Only a model's own files are fetched. The next time nothing is fetched again, with or without the Hub."""
    found = ask(hub, tmp_path)
    assert found["files"] == [
        "additional_chat_templates/tools.jinja", "chat_template.jinja", "config.json", "model.safetensors",
        "tokenizer.json",
    ]  # fmt: skip
    assert Path(found["folder"]).name == COMMIT["main"]
    assert (Path(found["folder"]) / "model.safetensors").read_bytes() == WEIGHTS
    hub.seen.clear()
    assert ask(hub, tmp_path) == found
    assert hub.fetched() == []
    hub.seen.clear()
    assert ask(hub, tmp_path, HF_HUB_OFFLINE="1") == found
    assert hub.seen == []


def test_a_revision_is_a_commit_of_its_own(hub: Hub, tmp_path: Path) -> None:
    hub.add("some/model", {**FILES, "config.json": b'{"model_type": "qwen2"}'}, "old")
    asked = [("some/model", revision) for revision in ("old", COMMIT["old"], None)]
    found, by_commit, newest = ask_all(hub, tmp_path, asked)
    assert Path(found["folder"]).name == COMMIT["old"]
    assert b"qwen2" in (Path(found["folder"]) / "config.json").read_bytes()
    assert by_commit == found
    assert Path(newest["folder"]).name == COMMIT["main"]


def test_what_is_not_there_is_said(hub: Hub, tmp_path: Path) -> None:
    missing, revision = ask_all(hub, tmp_path, [("some/other", None), ("some/model", "never")])
    assert missing["error"] == "CheckpointError"
    assert "target model 'some/other' is neither a folder here nor a model on the Hub" in missing["says"]
    assert "'some/model' at revision 'never' does not exist" in revision["says"]
    offline = ask(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "is not on this machine, and HF_HUB_OFFLINE is set" in offline["says"]
    assert offline["error"] == "CheckpointError"
    hub.url = "http://127.0.0.1:9"  # no server listens there
    assert "cannot be fetched" in ask(hub, tmp_path)["says"]


def test_a_gated_model_wants_a_token(hub: Hub, tmp_path: Path) -> None:
    hub.gated.add("some/model")
    refused = ask(hub, tmp_path)
    assert refused["error"] == "CheckpointError"
    assert "is not granted to you" in refused["says"]
    assert f"accept its terms at {hub.url}/some/model and log in" in refused["says"]
    assert "folder" in ask(hub, tmp_path, HF_TOKEN="hf_secret")
    assert "Bearer hf_secret" in hub.tokens()


def test_an_interrupted_download_goes_on(hub: Hub, tmp_path: Path) -> None:
    """A download goes on where it was interrupted: only an incomplete piece of 10 MiB is sent again."""
    weights = bytes(24 << 20)
    hub.add("some/model", {**FILES, "model.safetensors": weights})
    hub.cut["model.safetensors"] = 15 << 20
    found = ask(hub, tmp_path)
    assert (Path(found["folder"]) / "model.safetensors").read_bytes() == weights
    ranges = [headers.get("range") for method, path, headers in hub.seen if method == "GET" and "model.safe" in path]
    assert ranges == [None, f"bytes={10 << 20}-"]


def test_a_token_does_not_leave_the_endpoint(hub: Hub, tmp_path: Path) -> None:
    with serving(Hub(files=hub.files), "127.0.0.2") as elsewhere:
        hub.moved = elsewhere.url
        found = ask(hub, tmp_path, HF_TOKEN="hf_secret")
        assert "model.safetensors" in found["files"]
        assert elsewhere.fetched()
        assert set(elsewhere.tokens()) == {None}
    assert "Bearer hf_secret" in hub.tokens()


def test_a_token_is_not_sent_unencrypted(hub: Hub, tmp_path: Path) -> None:
    """A token is not sent to another machine without encryption. The error comes before anything is sent."""
    hub.url = "http://192.0.2.1:80"
    refused = ask(hub, tmp_path, HF_TOKEN="hf_secret")
    assert refused["error"] == "ConfigError"
    assert "HF_ENDPOINT = 'http://192.0.2.1:80' is not encrypted, and the token" in refused["says"]


def test_a_link_out_of_the_snapshot_is_refused(hub: Hub, tmp_path: Path) -> None:
    weights = Path(ask(hub, tmp_path)["folder"]) / "model.safetensors"
    weights.unlink()
    weights.symlink_to("/etc/hostname")
    refused = ask(hub, tmp_path)
    assert refused["error"] == "CheckpointError"
    assert "model.safetensors is a link to /etc/hostname; remove" in refused["says"]


@pytest.mark.parametrize("name", ["../../../secrets.safetensors", "/etc/passwd", "sub/model.safetensors", "..", 7])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    index = json.dumps({"weight_map": {"model.norm.weight": name}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=rf"model.safetensors.index.json names {name}, no files of"):
        weight_files(tmp_path, "target")


def test_a_model_of_one_gguf_file_is_read_as_such(hub: Hub, tmp_path: Path) -> None:
    file = write_gguf(make_checkpoint(tmp_path, "llama"), tmp_path / "tiny.gguf", "Q8_0")
    config = json.dumps({"model_type": "llama"}).encode()
    hub.add("some/model", {"README.md": b"words", "tiny.gguf": file.read_bytes(), "config.json": config})
    found = ask(hub, tmp_path)
    assert found["files"] == [".lock", "config.json", "generation_config.json", "model.gguf"]
    assert Path(found["path"]).name == "tiny.gguf"  # a repository for Triton names it
    hub.add("some/model", {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    assert "has several GGUF files (a.gguf, b.gguf)" in ask(hub, tmp_path)["says"]


def test_models_and_drafts_run_by_their_names(hub: Hub, tmp_path: Path) -> None:
    """Models and drafts run by their names.

    Drafts of a draft model that equals its target are accepted. A repository for Triton names the snapshots' folders.
    """
    checkpoint = make_checkpoint(tmp_path, "llama", vocab_size=320)
    (checkpoint / "tokenizer.json").write_text(byte_level().to_str())
    files = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    hub.add("some/model", files)
    hub.add("some/draft", files, "old")
    found = run(hub, tmp_path / "home", [RUN, str(tmp_path / "repository")], TRTSPEC_CACHE="off")
    assert len(found["ids"]) == 8
    assert found["accepted"] == pytest.approx(2.5, abs=0.5)
    served = found["served"]
    for path, commit in ((served["model"], "main"), (served["speculative_config"]["model"], "old")):
        assert Path(path).name == COMMIT[commit]
        assert (Path(path) / "model.safetensors").is_file()
    assert not {"revision"} & {*served, *served["speculative_config"]}


def test_what_is_here_wins_and_has_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert checkpoint_folder("some/model") == Path("some/model")
    with pytest.raises(ConfigError, match="revision = 'old', and draft model 'some/model' is on this machine"):
        checkpoint_folder("some/model", "draft", "old")
    assert checkpoint_folder(Path("another/model")) == Path("another/model")  # a Path is no name on the Hub
    with pytest.raises(CheckpointError, match="is not a folder on this machine"):
        read_checkpoint(Path("another/model"), "target")
