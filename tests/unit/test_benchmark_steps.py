"""benchmarks/steps.py: figures, byte counts, heads of random weights, turns, and one small run of the whole script."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.peers.checkpoints import SHAPES, Model, Shape, write_checkpoint
from benchmarks.steps import engines
from benchmarks.steps.engines import Workshop, write_head
from benchmarks.steps.main import main
from benchmarks.steps.results import Figure, Result, as_json, per_round, ratios, report_markdown, turns_table
from benchmarks.steps.rounds import Contestant, Turn, take_turn, take_turns
from benchmarks.steps.sections import Guesses
from benchmarks.steps.start import Start, weight_file_bytes
from tests.models.built_heads import head_of
from trtspec import LLM
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.models.weights import load_decoder

SHAPE = Shape(hidden=128, layers=6, intermediate=256, heads=2, kv_heads=1, vocab=960)
LAYER = 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256 + 2 * 128)  # bytes
HEAD_LAYER = 2 * (256 * (128 + 64 + 64) + 128 * 128 + 3 * 128 * 256 + 3 * 128)  # reads two states, concatenated
DRAFT_VOCAB = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint(SHAPE, folder / "small")
    write_head(folder / "small", folder / "head", DRAFT_VOCAB)
    return Model("small", folder / "small", None, folder / "head")


# -- figures ----------------------------------------------------------------------------------------------------------


def turn(contestant: str, number: int, step: float) -> Turn:
    return Turn(contestant, number, 6, [step, step, 9.0], [step / 2] * 3, weight_bytes=1e6, read_bandwidth=1e7)


TURNS = [turn("a", 1, 0.2), turn("b", 1, 0.3), turn("a", 2, 0.4), turn("b", 2, 0.4)]


def test_a_turn_in_figures() -> None:
    one = TURNS[0]
    assert (one.step, one.host) == (0.2, 0.1)  # medians
    assert one.tokens_per_second == pytest.approx(2 / 0.2)  # without the step of 9 s
    assert one.bandwidth_share == pytest.approx(0.5)  # 0.1 s to read the weights


def test_ratios_are_taken_within_rounds() -> None:
    assert per_round(TURNS, "b", lambda turn: turn.step) == [0.3, 0.4]
    assert ratios(TURNS, "b", "a") == pytest.approx([1.5, 1.0])
    assert ratios(TURNS, "a", "b", lambda turn: turn.weight_bytes) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("figure", "met", "cells"),
    [
        (Figure("r", [1.0, 1.2, 1.1], "x", 1.1), True, ["r", "1.100x", "1.000x .. 1.200x", "≤ 1.100x", "yes"]),
        (Figure("r", [0.9], "share", 0.92, at_least=True), False, ["r", "0.900", "0.900 .. 0.900", "≥ 0.920", "NO"]),
        (Figure("r", [80.4], "us"), None, ["r", "80 µs", "80 µs .. 80 µs", "", ""]),
    ],
)
def test_figures_and_targets(figure: Figure, met: bool | None, cells: list[str]) -> None:
    assert figure.met is met
    assert figure.cells() == cells


def test_tables_and_json() -> None:
    result = Result("rows", [Figure("b / a", ratios(TURNS, "b", "a"), "x", 1.3)], TURNS, ["a note"])
    _, cells = turns_table(TURNS)
    assert [line[:3] for line in cells] == [["a", "300.000 ms", "1.000"], ["b", "350.000 ms", "1.250"]]
    text = report_markdown([result], ["about"])
    assert "| rows | b / a | 1.250x | 1.000x .. 1.500x | ≤ 1.300x | yes |" in text
    assert text.endswith("- about\n- a note")
    (data,) = json.loads(json.dumps(as_json([result])))
    assert data["figures"][0]["values"] == pytest.approx([1.5, 1.0])
    assert [one["step_s"] for one in data["turns"]] == [0.2, 0.3, 0.4, 0.4]


def test_a_start_in_figures(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "weights.safetensors").write_bytes(b"12345")
    assert weight_file_bytes(tmp_path) == 5
    one = Start(
        cold=False,
        import_s=1.0,
        constructor_s=0.5,
        first_token_s=0.75,
        import_rss=200,
        peak_rss=1000,
        weight_bytes=600,
        kv_bytes=150,
    )
    assert one.overhead == 250
    assert one.to_dict()["overhead"] == 250


# -- what is measured -------------------------------------------------------------------------------------------------


def test_heads_load_strictly_and_spread_their_ids(model: Model) -> None:
    assert model.eagle3 is not None
    target = load_decoder(ModelConfig.from_folder(model.folder), torch.bfloat16)
    head = head_of("eagle3", model.eagle3, target, num_captured=3)
    assert head.spec.draft_vocab_size == DRAFT_VOCAB
    assert head.target_ids.tolist() == list(range(0, SHAPE.vocab, 10))
    assert head.spec.own_head
    assert not head.spec.own_embedding


def test_bytes_of_weights_and_kv(model: Model) -> None:
    """weight_bytes counts what a launch reads: nothing of the embedding, and the head's layer once per draft."""
    K, blocks = 3, 20
    speculation = {"method": "eagle3", "model": str(model.eagle3), "num_speculative_tokens": K}
    with LLM(model.folder, speculation, num_kv_blocks=blocks) as llm:
        (executable,) = llm.engine.executables
        target = SHAPE.layers * LAYER + 2 * (128 + 128 * SHAPE.vocab)
        fuse, norm_and_head = 2 * 3 * 128 * 128, 2 * (128 + 128 * DRAFT_VOCAB)
        assert executable.weight_bytes == target + fuse + K * (HEAD_LAYER + norm_and_head)
        assert executable.kv_bytes == (SHAPE.layers + 1) * 2 * blocks * 16 * 64 * 2


def test_heads_are_kept_until_what_they_are_made_of_changes(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    workshop = Workshop(tmp_path, reports.append)
    head = workshop.head(model, DRAFT_VOCAB)
    assert workshop.head(model, DRAFT_VOCAB) == head
    assert len(reports) == 1
    retrained = tmp_path / "small"
    shutil.copytree(model.folder, retrained, copy_function=shutil.copyfile)  # its files are newer
    workshop.head(Model("small", retrained, None, None), DRAFT_VOCAB)
    assert len(reports) == 2
    monkeypatch.setattr(engines, "write_head", lambda target, folder, vocab: (folder / "config.json").write_text("{}"))
    workshop.head(model, DRAFT_VOCAB)  # changed code
    assert len(reports) == 3
    assert [file.name for file in sorted(head.iterdir())] == ["config.json", "made_of.txt"]


# -- turns ------------------------------------------------------------------------------------------------------------


def test_turns_time_the_steps_asked_for(model: Model) -> None:
    """Steps of an eager engine verify the number of guesses that the drafter is set to, and accept none of them."""
    drafter = Guesses(SHAPE.vocab)
    speculation = {"method": "custom_class", "drafter": drafter, "num_speculative_tokens": 3}
    probes = iter([1e9, 3e9, 5e9, 5e9, 7e9, 9e9, 9e9])
    with LLM(model.folder, speculation, force_num_accepted_tokens=0, enable_prefix_caching=False) as llm:
        prompts = [[1, 2, 3], [4, 5]]
        contestants = [
            Contestant(f"{n} drafts", llm.engine, prompts, 4, n, prepare=lambda n=n: drafter.use(n))  # type: ignore[misc]
            for n in (0, 3)
        ]
        turns = take_turns(contestants, 2, lambda: next(probes), lambda what: None)
        llm.engine.check()
        wrong = Contestant("2 drafts", llm.engine, prompts, 4, 2)
        with pytest.raises(RuntimeError, match="2 drafts: a step verified"):
            take_turn(wrong, 0)
    assert [(turn.contestant, turn.round) for turn in turns] == [(f"{n} drafts", r) for r in (1, 2) for n in (0, 3)]
    assert [turn.read_bandwidth for turn in turns] == [6e9, 5e9, 8e9, 9e9]  # in round 1 the second came first
    for one in turns:
        assert len(one.step_times) == len(one.host_times) == 4
        assert one.tokens == 8
        assert one.weight_bytes == model.weight_bytes
        assert 0 < one.host < one.step


def test_sequences_too_short_for_the_steps_are_named(model: Model) -> None:
    with LLM(model.folder, max_seq_len=6) as llm, pytest.raises(RuntimeError, match="plain: the sequences are too"):
        take_turn(Contestant("plain", llm.engine, [[1, 2]], 10), 0)


# -- the script -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SHAPES, "40M", SHAPE)
    options = ["--model", "40M", "--only", "rows,start", "--rounds", "1", "--steps", "3", "--threads", "1"]
    file = tmp_path / "steps.json"
    assert main("x", [*options, "--work", str(tmp_path / "work"), "--json", str(file)]) == 0
    shown = capsys.readouterr()
    assert "building" in shown.err
    for words in ("step of 8 rows / of 1 row", "peak memory beyond weights and KV pool", "| 4 rows |"):
        assert words in shown.out
    rows, start = json.loads(file.read_text())["sections"]
    assert [one["contestant"] for one in rows["turns"]] == ["1 row", "4 rows", "8 rows"]
    assert all(one["weight_bytes"] == rows["turns"][0]["weight_bytes"] for one in rows["turns"])
    assert [one["cold"] for one in start["details"]] == [True, False, False, False]
    assert all(0 < one["constructor_s"] < one["first_token_s"] for one in start["details"])
    assert all(one["kv_bytes"] == 6 * 2 * (8 * 64 + 1) * 16 * 64 * 2 for one in start["details"])
    main("x", [*options, "--work", str(tmp_path / "work")])
    assert "building" not in capsys.readouterr().err  # the models were kept


@pytest.mark.parametrize("arguments", [["--only", "columns"], ["--only", ""], ["--rounds", "0"], ["--model", "7B"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("x", arguments)
    assert "error:" in capsys.readouterr().err
