"""`trtspec train` on conversations, killed at every stage: the same command goes on and learns the same."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.e2e.tiny import add_tokenizer, make_target
from tests.e2e.training import metrics, random_ids, start
from trtspec import LLM, SamplingParams
from trtspec.cli import main

TEMPLATE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in target/, and conversations of two turns.

    The user's messages are random letters. `--regenerate` replaces the answers by the target's own.
    """
    folder = tmp_path_factory.mktemp("resume")
    add_tokenizer(make_target(folder, max_position_embeddings=512))
    (folder / "target" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE})
    )
    letters = np.array(list("abcdefg"))
    for name, count, seed in (("train", 700, 0), ("held_out", 24, 1)):
        said = letters[random_ids(count * 24, seed) % len(letters)].reshape(count, 2, 12)
        chats = [
            [message for part in both for message in ({"role": "user", "content": "".join(part)},
                                                       {"role": "assistant", "content": "a"})]
            for both in said
        ]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return folder


def arguments(folder: Path, out: Path) -> list[str]:
    return ["train", "eagle3", "--out", str(out), "--target", str(folder / "target"),
            "--data", str(folder / "train.jsonl"), "--held-out", str(folder / "held_out.jsonl"),
            "--dtype", "float32", "--capture-layers=0,1", "--unroll", "3", "--seq-len", "96", "--batch-size", "4",
            "--regenerate", "700", "--regenerate-len", "24", "--steps", str(STEPS),
            "--checkpoint-seconds", "0"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without any interruption."""
    out = tmp_path_factory.mktemp("whole") / "head"
    assert main(arguments(folder, out)) == 0
    return out


def test_it_learns_from_conversations_and_is_measured_on_them(folder: Path, whole: Path) -> None:
    run = whole.with_name("head.run")
    found = json.loads((run / "evaluation.json").read_text())
    assert found["prompts"] == 24
    assert 1.0 <= found["acceptance_length"] <= 4.0
    assert metrics(run)[-1]["loss"] < metrics(run)[0]["loss"]
    rows = np.load(run / "conversations.npy")
    assert rows.shape[1] == 96
    assert rows["taught"].sum() > 700 * 10
    prompt = {"prompt": "abcabcabc</s>"}
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(folder / "target", dtype="float32") as llm:
        plain = llm.generate(prompt, params)[0].outputs[0].token_ids
    spec = {"method": "eagle3", "model": str(whole), "num_speculative_tokens": 3}
    with LLM(folder / "target", spec, dtype="float32") as llm:
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == plain


STAGES: dict[str, Callable[[Path], bool]] = {
    "regeneration": lambda run: any(run.glob("regenerate/*.json")),
    "conversations": lambda run: (run / "conversations.npy").is_file(),
    "states": lambda run: any(file.stat().st_size > 0 for file in run.glob("states/*.crc")),
    "training": lambda run: any(int(file.stem[5:]) >= 5 for file in run.glob("step-*.pt")),
}


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_any_stage_it_goes_on(folder: Path, whole: Path, tmp_path: Path, stage: str) -> None:
    command, run = arguments(folder, tmp_path / "head"), tmp_path / "head.run"
    process = start(command)
    deadline = time.monotonic() + 120
    while not STAGES[stage](run):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.communicate(timeout=60)
    assert not (tmp_path / "head" / "model.safetensors").exists()  # killed before its end, so something was left to do
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*.json") if file.parent.name == "regenerate"}
    reached = max((int(file.stem[5:]) for file in run.glob("step-*.pt")), default=0)
    assert (5 if stage == "training" else 0) <= reached < STEPS

    process = start(command)
    while before and not (run / "conversations.npy").is_file():
        assert all(file.stat().st_mtime_ns == made for file, made in before.items() if file.is_file())
        assert process.poll() is None
        time.sleep(0.01)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    ours, theirs = metrics(run), metrics(whole.with_name("head.run"))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [1, 10, 20]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], abs=2e-3)
    for name, tensor in load_file(tmp_path / "head" / "model.safetensors").items():
        assert tensor.float().allclose(load_file(whole / "model.safetensors")[name].float(), atol=2e-2), name
    if reached:
        assert f"· step {reached + 1} · " in stderr
    rows = [np.load(one / "conversations.npy") for one in (run, whole.with_name("head.run"))]
    assert np.array_equal(*rows)
