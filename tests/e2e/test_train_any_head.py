"""`trtspec train` of every kind of head except EAGLE3, which test_train_cli tests.

The engine runs, from the written folder, what was learnt in training.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.tiny import add_tokenizer, make_target
from tests.e2e.training import metrics, random_ids, start, wait_for
from trtspec import LLM, SamplingParams
from trtspec.cli import main

K, NEW = 3, 64
PROMPT = 64
HELD_OUT = random_ids(24 * PROMPT, seed=1)


@dataclass(frozen=True)
class Kind:
    """A kind of head: the arguments of its training, and fields of its speculative_config other than its folder."""

    name: str
    arguments: tuple[str, ...] = ()
    words: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join((self.name, *self.arguments)).replace("-" * 3, "-")

    def engine(self, target: Path, out: Path, k: int = K) -> LLM:
        words = {"method": self.name, "num_speculative_tokens": k, **dict(self.words)}
        model = out if self.name == "mtp" else target
        return LLM(model, words if self.name == "mtp" else {**words, "model": str(out)}, dtype="float32")


KINDS = (
    Kind("medusa"),
    Kind("mlp_speculator", ("--tie-weights", "--inner-size", "48")),
)
LONG_KINDS = (Kind("eagle"), Kind("mtp"), Kind("mtp", ("--modules", str(K)), (("vanilla", True),)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of two layers in target/, and random ids in text.npy and held_out.npy.

    The target answers them itself.
    """
    folder = tmp_path_factory.mktemp("train")
    add_tokenizer(make_target(folder, max_position_embeddings=512))
    np.save(folder / "text.npy", random_ids(40_000, seed=0))
    np.save(folder / "held_out.npy", HELD_OUT)
    return folder


def arguments(folder: Path, kind: Kind, out: Path, *more: str) -> list[str]:
    """Arguments of a small run in fp32."""
    return ["train", kind.name, "--target", str(folder / "target"), "--data", str(folder / "text.npy"),
            "--out", str(out), "--dtype", "float32", "--unroll", str(K), "--seq-len", "48",
            "--regenerate", "128", "--regenerate-len", str(NEW), "--held-out", str(folder / "held_out.npy"),
            *kind.arguments, *more]  # fmt: skip


def generate(llm: LLM) -> tuple[list[Sequence[int]], float]:
    """Greedy continuations of the held-out prompts, and their acceptance length."""
    with llm:
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        outputs = llm.generate(HELD_OUT.reshape(-1, PROMPT).tolist(), params)
        return [output.outputs[0].token_ids for output in outputs], llm.get_metrics().speculation.acceptance_length


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Sequence[int]]:
    return generate(LLM(folder / "target", dtype="float32"))[0]


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG_KINDS)], ids=str
)
def test_what_training_learns_is_what_the_engine_runs(
    folder: Path, tmp_path: Path, plain: list[Sequence[int]], kind: Kind
) -> None:
    """A trained head is better than an untrained one, and changes no output.

    Its acceptance length in the engine is the one simulated on the same prompts. Only the bf16 of the folder and the
    drafts of each request's last steps make a difference.
    """
    lengths = {}
    for name, more in (("untrained", ("--steps", "1", "--regenerate", "0")), ("trained", ("--steps", "60"))):
        assert main(arguments(folder, kind, tmp_path / name, *more)) == 0
        lengths[name] = json.loads((tmp_path / f"{name}.run" / "evaluation.json").read_text())["acceptance_length"]
    curve = metrics(tmp_path / "trained.run")
    text, length = generate(kind.engine(folder / "target", tmp_path / "trained"))
    print(f"{kind}: {lengths}, engine {length:.3f}, {curve[-1]['seconds']} s")
    assert text == plain
    assert curve[-1]["smooth"] < curve[0]["loss"]
    assert lengths["trained"] > lengths["untrained"] + 0.2
    assert length == pytest.approx(lengths["trained"], abs=0.06)


@pytest.mark.long
def test_killed_it_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    """A killed run goes on where it was, and learns the same as an uninterrupted one."""
    medusa = next(kind for kind in KINDS if kind.name == "medusa")
    small = ("--steps", "30", "--batch-size", "4", "--regenerate", "16", "--checkpoint-seconds", "0")
    command, run = arguments(folder, medusa, tmp_path / "head", *small), tmp_path / "head.run"
    process = start(command)
    wait_for(process, run, 5)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "head" / "model.safetensors").exists()
    assert main(command) == 0
    assert main(arguments(folder, medusa, tmp_path / "whole", *small)) == 0
    parts, whole = metrics(run), metrics(tmp_path / "whole.run")
    assert [line["step"] for line in parts] == [line["step"] for line in whole] == [1, 10, 20, 30]
    assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in whole], abs=2e-3)


def test_a_run_is_of_one_kind(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, status in (KINDS[1], 0), (KINDS[0], 1):
        more = ("--steps", "1", "--regenerate", "0", "--run", str(tmp_path / "run"))
        assert main(arguments(folder, kind, tmp_path / "head", *more)) == status
    assert "holds a run with another kind" in capsys.readouterr().err


def test_kinds_have_their_own_arguments(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments(folder, KINDS[1], tmp_path / "head", "--steps", "1", "--capture-layers", "0"))
    assert exit.value.code == 2
