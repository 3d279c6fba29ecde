"""`trtspec train eagle3`, run as a person runs it: it learns, it survives being killed, and it names errors."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.tiny import add_tokenizer, make_target
from tests.e2e.training import metrics, random_ids, start, wait_for
from trtspec import LLM, SamplingParams
from trtspec.cli import main
from trtspec.cli.train import add_arguments
from trtspec.outputs import SpeculationStats
from trtspec.train.run import KINDS

K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of two layers in target/, and random ids in text.npy.

    A head learns the target's answers to them, not the data.
    """
    folder = tmp_path_factory.mktemp("train")
    add_tokenizer(make_target(folder, max_position_embeddings=512))
    np.save(folder / "text.npy", random_ids(40_000, seed=0))
    np.save(folder / "held_out.npy", random_ids(4_000, seed=1))
    return folder


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    """Arguments of a small run in fp32; `more` overrides them."""
    return ["train", "eagle3", "--out", str(out),
            "--target", str(folder / "target"), "--data", str(folder / "text.npy"),
            "--dtype", "float32", "--capture-layers=0,1", "--unroll", str(K), "--seq-len", "64",
            "--regenerate", "384", "--regenerate-len", "64", *more]  # fmt: skip


# -- learning ---------------------------------------------------------------------------------------------------------


def acceptance(folder: Path, spec: dict[str, Any]) -> tuple[SpeculationStats, list[Sequence[int]]]:
    """Acceptance of greedy continuations of 24 prompts that were not trained on, and these continuations."""
    prompts = random_ids(24 * 64, seed=1).reshape(24, 64).tolist()
    with LLM(folder / "target", {"num_speculative_tokens": K, **spec}, dtype="float32") as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
        found = llm.get_metrics().speculation
    return found, [output.outputs[0].token_ids for output in outputs]


@pytest.mark.long
def test_a_trained_head_beats_an_untrained_one_and_ngram(folder: Path, tmp_path: Path) -> None:
    trained, fresh = tmp_path / "trained", tmp_path / "fresh"
    assert main(arguments(folder, trained, "--steps", "220", "--held-out", str(folder / "held_out.npy"))) == 0
    assert main(arguments(folder, fresh, "--steps", "1", "--regenerate", "0")) == 0
    trained_stats, text = acceptance(folder, {"method": "eagle3", "model": str(trained)})
    untrained_stats, same = acceptance(folder, {"method": "eagle3", "model": str(fresh)})
    ngram_stats, plain = acceptance(folder, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3})
    each = [stats.tokens_per_step for stats in (trained_stats, untrained_stats, ngram_stats)]
    print(f"tokens per step: trained {each[0]:.2f}, untrained {each[1]:.2f}, n-gram {each[2]:.2f}")
    assert text == same == plain
    assert each[0] > each[1] + 1.0
    assert each[0] > each[2] + 0.25
    simulated = json.loads((tmp_path / "trained.run" / "evaluation.json").read_text())
    assert simulated["acceptance_length"] == pytest.approx(trained_stats.acceptance_length, abs=0.25)  # other prompts
    assert len(simulated["acceptance_per_position"]) == simulated["num_draft_tokens"] == K
    assert (tmp_path / "trained.run" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    curve = metrics(tmp_path / "trained.run")
    assert curve[-1]["smooth"] < curve[0]["loss"] - 0.8
    assert curve[-1]["acceptance_length"] > curve[0]["acceptance_length"] + 0.5
    watched = [line["held_out_acceptance_length"] for line in curve if "held_out_acceptance_length" in line]
    assert len(set(watched)) > 12
    assert watched[-1] > watched[0] + 0.5
    assert watched[-1] == pytest.approx(simulated["acceptance_length"], abs=0.1)


# -- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_stopped_and_killed_it_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    small = ("--steps", "40", "--batch-size", "4", "--regenerate", "16", "--checkpoint-seconds", "0")
    command = arguments(folder, tmp_path / "head", *small)
    run = tmp_path / "head.run"
    process = start(command)
    wait_for(process, run, 5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert f"kept in {run}, the same command goes on from there" in stderr
    assert (run / "metrics.png").is_file()
    stopped = max(run.glob("step-*.pt"))
    assert not (tmp_path / "head").joinpath("model.safetensors").exists()

    process = start(command)
    wait_for(process, run, int(stopped.stem.split("-")[1]) + 3)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    killed = max(run.glob("step-*.pt"))
    assert stopped < killed < run / "step-00000040.pt"

    assert main(command) == 0
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    assert main(arguments(folder, tmp_path / "whole", *small)) == 0
    parts, whole = metrics(run), metrics(tmp_path / "whole.run")
    assert [line["step"] for line in parts] == [line["step"] for line in whole] == [1, 10, 20, 30, 40]
    assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in whole], abs=2e-3)
    heads = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("head", "whole")]
    assert heads[0] == heads[1]
    assert main(command) == 0  # finished: exports again

    before = (tmp_path / "head" / "model.safetensors").read_bytes()
    assert main(arguments(folder, tmp_path / "head", "--steps", "60", *small[2:])) == 0
    longer = metrics(run)
    assert [line["step"] for line in longer] == [1, 10, 20, 30, 40, 50, 60]
    assert longer[:5] == parts
    assert longer[5]["lr_scale"] > parts[4]["lr_scale"] + 0.1
    assert longer[-1]["smooth"] < parts[-1]["smooth"]
    assert (tmp_path / "head" / "model.safetensors").read_bytes() != before


def test_another_run_in_the_same_folder_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--steps", "1", "--regenerate", "0")
    assert main(arguments(folder, tmp_path / "head", *small, "--run", str(tmp_path / "run"))) == 0
    capsys.readouterr()
    assert main(arguments(folder, tmp_path / "head", *small, "--run", str(tmp_path / "run"), "--seed", "3")) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path / 'run'} holds a run with another seed (seed=0)" in error
    assert error.count("\n") == 1


def test_without_matplotlib_it_trains_and_names_the_package(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(arguments(folder, tmp_path / "head", "--steps", "1", "--regenerate", "0")) == 0
    assert 'no metrics.png: matplotlib is not installed; run: pip install "trtspec[bench]"' in capsys.readouterr().err
    assert (tmp_path / "head" / "model.safetensors").is_file()


# -- bad input: one line of error, and nothing is trained --------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--target", "nowhere"), "'nowhere' is not a folder"),
        (("--data", "nowhere"), "nowhere cannot be read"),
        (("--data", "{}/other_vocabulary.npy"), "holds the ids 0..16; the target's are 0..15"),
        (("--data", "{}/negative.npy"), "holds the ids -1..3"),
        (("--data", "{}/matrix.npy"), "token ids are one row of integers"),
        (("--data", "{}/floats.npy"), "token ids are one row of integers"),
        (("--data", "{}/empty.npy"), "token ids are one row of integers"),
        (("--data", "{}/damaged.npy"), "is no readable .npy file"),
        (("--data", "{}/bytes.bin"), "no UTF-8 text"),
        (("--data", "{}/nothing"), "no UTF-8 text"),
        (
            ("--data", "{}/some.npy", "--batch-size", "16"),
            "make 9 prompts of 64 for regenerate, less than batch_size=16",
        ),
        (("--data", "{}/few.npy", "--regenerate", "0"), "0 windows of seq_len=64 make no batch_size=8"),
        (("--target", "{}/no_tokenizer", "--data", "{}/text.txt"), "has no tokenizer.json"),
        (("--capture-layers", "0,2"), "capture_layers=(0, 2): the target has 2 layers; use ids in [0, 1]"),
        (("--capture-layers=-1,0",), "use ids in [0, 1]"),
        (("--capture-layers", "0;1"), "use layer numbers separated by commas"),
        (("--draft-vocab-size", "17"), "draft_vocab_size=17: the target's vocabulary has 16 ids"),
        (("--seq-len", "600"), "the target has 512 positions"),
        (("--regenerate-len", "500"), "the target has 512 positions"),
        (("--held-out", "{}/few.npy"), "less than one prompt of 64"),
        (("--held-out", "{}/bytes.bin"), "no UTF-8 text"),
        (("--out", "{}/few.npy"), "File exists"),
        (("--steps", "0"), "must be positive"),
        (("--learning-rate", "0"), "learning_rate=0.0 must be positive"),
        (("--dtype", "int4"), "dtype='int4'"),
    ],
)
def test_bad_input(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    make_bad_files(folder, tmp_path)
    more = tuple(word.replace("{}", str(tmp_path)) for word in more)
    assert main(arguments(folder, tmp_path / "head", "--steps", "1", *more)) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("trtspec: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("step-*.pt"))


def make_bad_files(folder: Path, to: Path) -> None:
    for name, ids in {
        "other_vocabulary": np.arange(17),
        "negative": np.arange(-1, 4),
        "matrix": np.ones((2, 2), np.int64),
        "floats": np.ones(9),
        "empty": np.empty(0, np.int64),
        "few": np.ones(63, np.int64),
        "some": np.ones(600, np.int64),
    }.items():
        np.save(to / f"{name}.npy", ids)
    (to / "damaged.npy").write_bytes(b"\x93NUMPY\x01")
    (to / "bytes.bin").write_bytes(b"\xff\xfe\xfd")
    (to / "nothing").mkdir()
    (to / "text.txt").write_text("abc")
    (to / "no_tokenizer").mkdir()
    for name in ("config.json", "model.safetensors"):
        os.link(folder / "target" / name, to / "no_tokenizer" / name)


@pytest.mark.parametrize("more", [(), ("--steps", "1", "--minutes", "1")])
def test_a_run_has_one_length(folder: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments(folder, tmp_path / "head", *more))
    assert exit.value.code == 2


def test_text_files_and_folders_of_them_are_data(folder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("abcdefg" * 40)
    (texts / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "b.txt").write_text("gfedcba" * 80)
    small = ("--steps", "2", "--regenerate", "4", "--batch-size", "2")
    data = ("--data", str(texts), str(tmp_path / "b.txt"), str(folder / "held_out.npy"))
    assert main(arguments(folder, tmp_path / "head", *small, *data, "--draft-vocab-size", "5")) == 0
    tokens = np.load(tmp_path / "head.run" / "tokens.npy")
    assert len(tokens) == 7 * 120 + 4_000
    assert tokens[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 1]
    assert json.loads((tmp_path / "head" / "config.json").read_text())["draft_vocab_size"] == 5


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_option_of_a_kind_can_be_given(kind: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, kind)
    given = {action.dest for action in parser._actions}
    fields = {field.name for field in dataclasses.fields(KINDS[kind])}
    assert fields - given == {"run"} | (set() if KINDS[kind].simulated else {"held_out"})


def test_what_the_command_line_says_is_what_is_trained(folder: Path, tmp_path: Path) -> None:
    """A DSpark draft gets every option as given on the command line. It has options of every type."""
    given = arguments(folder, tmp_path / "head", "--steps", "1", "--regenerate", "0", "--rank", "4", "--markov", "rnn",
                      "--no-confidence", "--anchors", "3", "--mask-token-id", "7", "--num-layers", "2",
                      "--states-gib", "inf")  # fmt: skip
    assert main(["train", "dspark", *given[2:]]) == 0
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 2]  # there, an id is the layer entered
    assert (config["markov_rank"], config["markov_head_type"], config["block_size"]) == (4, "rnn", K)
    assert (config["enable_confidence_head"], config["mask_token_id"]) == (False, 7)
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
