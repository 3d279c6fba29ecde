"""benchmarks/gpu.py without a GPU: a CPU thread stands in for its queue, and a counting clock for its events."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.gpu import checkpoints, kernels
from benchmarks.gpu.card import Card, copy_bandwidth
from benchmarks.gpu.checkpoints import SHAPES, split, write_head, write_target
from benchmarks.gpu.main import main
from benchmarks.gpu.results import Case, Peer, Result, report_markdown
from benchmarks.gpu.sections import SECTIONS, floor_figure, gap_figure
from benchmarks.gpu.steps import GREEDY, INPUT_LEN, Opened, Steps, percentile, random_prompts, step_bytes
from benchmarks.peers.checkpoints import Shape, llama_tensors
from tests.async_stand_in import HostQueue
from trtspec.build import wiring
from trtspec.engine.overlap import OverlapLoop

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(hidden=64, layers=6, intermediate=96, heads=4, kv_heads=2, vocab=320, head_dim=32)
TICK = 1e-3  # seconds between two recorded moments


class Clock:
    """A clock whose every moment is one tick after the one before."""

    def __init__(self) -> None:
        self.ticks = itertools.count(1)
        self.held = 0

    def hold(self) -> None:
        self.held += 1

    def stamp(self) -> Moment:
        return Moment(self)


class Moment:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.at = next(self.clock.ticks)

    def elapsed_time(self, later: Moment) -> float:
        return 1e3 * TICK * (later.at - self.at)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def card(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.setattr(wiring, "open_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(wiring, "CudaQueue", HostQueue)
    monkeypatch.setattr(wiring, "free_memory", lambda device: 10**9)
    monkeypatch.setitem(SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(kernels, "LEAST_BYTES", 10_000)
    monkeypatch.setattr(kernels, "ROWS", (1, 65))
    monkeypatch.setattr(kernels, "GROUP", 32)
    monkeypatch.setattr(kernels, "GENERATIONS", ((2, 40),))
    monkeypatch.setattr(kernels, "PROMPTS", (50,))
    about = {"card": "a thread", "driver": "none"}
    return Card(torch.device("cpu"), about, clock.stamp, clock.hold, lambda: None, lambda: None, lambda work: work)


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_step() -> None:
    """A token of a request has 2 * 2 heads * 32 numbers of 2 bytes in each layer: 256 bytes."""
    assert step_bytes(10_000, SHAPE, 1, 100, 1, 0) == 10_000 + 6 * 256 * 101
    verified = 6 * 3 * 256 * (100 + 4)  # three requests; the cache is read once for all rows
    assert step_bytes(10_000, SHAPE, 3, 100, 4, 0) == 10_000 + verified
    first, second, third = 100 + 4, 100 + 1, 100 + 1  # passes of the head, which has one layer
    assert step_bytes(10_000, SHAPE, 3, 100, 4, 3) == 10_000 + verified + 3 * 256 * (first + second + third)


def test_copies_count_what_is_read_and_written(card: Card) -> None:
    assert copy_bandwidth(card, 5000, repeats=3) == pytest.approx(2 * 5000 / TICK)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SHARD_BYTES", 60_000)
    write_target(SHAPE, torch.device("cpu"), tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert {file.name for file in files} == set(index["weight_map"].values())
    found = 0
    for file in files:
        shard: Any = safe_open(file, "pt")
        for name in shard.keys():  # noqa: SIM118  (not a dict)
            assert index["weight_map"][name] == file.name
            found += shard.get_tensor(name).nbytes
        assert file.stat().st_size < 70_000
    layer = 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 96 + 2 * 64
    assert found == index["metadata"]["total_size"] == 2 * (6 * layer + 2 * 320 * 64 + 64)


def test_a_tensor_larger_than_a_shard_is_alone() -> None:
    sizes = {"a": (2,), "b": (100,), "c": (3,), "d": (3,), "e": (3,)}  # 4, 200, 6, 6, 6 bytes
    assert split(sizes, 12) == [["a"], ["b"], ["c", "d"], ["e"]]


def test_tied_models_have_no_head_of_their_own(tmp_path: Path) -> None:
    write_target(Shape(64, 1, 64, 2, 2, 320, tied=True), torch.device("cpu"), tmp_path)
    assert "lm_head.weight" not in json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]


def test_the_shapes_are_those_they_are_called_after() -> None:
    def count(name: str) -> float:
        return sum(map(checkpoints.num_bytes, llama_tensors(SHAPES[name]).values())) / 2e9

    assert count("1B") == pytest.approx(1.236, abs=1e-3)  # Llama-3.2-1B's
    assert count("8B") == pytest.approx(8.030, abs=1e-3)  # Llama-3.1-8B's


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, write in (("target", write_target), ("head", write_head)):
        (tmp_path / name).mkdir()
        write(SHAPE, torch.device("cpu"), tmp_path / name)
    return tmp_path


def test_steps_and_gaps_of_launches_that_follow_each_other(folder: Path, card: Card, clock: Clock) -> None:
    opened = Opened(folder / "target", None, 4, card)
    loop = opened.engine.loop
    assert isinstance(loop, OverlapLoop)
    for overlaps in (True, False):
        opened.overlap(overlaps)
        assert isinstance(opened.engine.loop, OverlapLoop) == overlaps
        steps = opened.steps(random_prompts(SHAPE, 3), GREEDY, 0, 5)
        assert steps.device == pytest.approx([TICK] * 5)
        assert steps.gaps == pytest.approx([TICK] * 4)  # no launch is missing between two
        assert (len(steps.walls), steps.tokens) == (5, 15)
        # 1 token of the prefill step and 12 of steps that are not measured; the newest token is not in the cache
        assert steps.context == INPUT_LEN + 1 + 12 - 1 + 2
        assert len(opened.queue.launches) == 5  # no earlier launch is among them
        assert clock.held == 0
        opened.engine.check()
    opened.queue.holds = True
    opened.steps(random_prompts(SHAPE, 1), GREEDY, 0, 5)
    assert clock.held == 1 + 12 + 5  # every launch, including the prefill
    with pytest.raises(RuntimeError, match="other than 1 requests with 2 drafts"):
        opened.steps(random_prompts(SHAPE, 1), GREEDY, 2, 5)
    opened.close()


def test_drafts_are_accepted_as_told(folder: Path, card: Card) -> None:
    speculation = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 3}
    opened = Opened(folder / "target", speculation, 2, card)
    for accepted in (0, 2):
        opened.force(accepted)
        steps = opened.steps(random_prompts(SHAPE, 2), GREEDY, 3, 4)
        assert steps.tokens == 4 * 2 * (accepted + 1)
        assert steps.context == INPUT_LEN + (12 + 1.5) * (accepted + 1)
    opened.close()


# -- results ----------------------------------------------------------------------------------------------------------


def steps_of(device: float, gap: float) -> Steps:
    return Steps([device] * 3, [gap, gap], [device + gap] * 3, 6, 100.0)


def case_of(steps: Steps) -> Case:
    return Case.of("tiny", "plain", 1, steps, 1e6, 1e9)  # 1 ms to move the bytes


def test_a_case_in_figures() -> None:
    steps = Steps([2e-3, 1e-3, 9e-3], [1e-6, 7e-6], [3e-3, 2e-3, 5e-3], 5, 100.0)
    case = case_of(steps)
    assert (case.step, case.floor, case.wall) == pytest.approx((2000, 1000, 3000))
    assert (case.gap, case.gap_p95) == pytest.approx((4, 7))
    assert case.over_floor == pytest.approx(2)
    assert case.tokens_per_second == pytest.approx(5 / 10e-3)
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile(list(map(float, range(1, 101))), 0.95) == 95.0


@pytest.mark.parametrize(("device", "gap", "met"), [(1.19e-3, 19e-6, "yes"), (1.21e-3, 21e-6, "NO")])
def test_targets_are_met_or_missed(device: float, gap: float, met: str) -> None:
    steps = steps_of(device, gap)
    figures = [floor_figure(1, [case_of(steps)], [steps]), gap_figure(1, [steps])]
    assert [figure.met for figure in figures] == [met == "yes"] * 2
    page = report_markdown({"card": "a card", "date": "today"}, [Result("plain", "tiny", figures, [case_of(steps)])])
    ratio, idle = f"{device * 1e3:.3f}x", f"{gap * 1e6:.0f} µs"
    assert f"| tiny | plain | step / floor, batch 1 | {ratio} | {ratio} .. {ratio} | ≤ 1.200x | {met} |" in page
    assert f"| tiny | plain | gap, batch 1 | {idle} | {idle} .. {idle} | ≤ 20 µs | {met} |" in page


def test_what_has_no_target_and_what_failed() -> None:
    steps = steps_of(9e-3, 9e-3)
    assert floor_figure(8, [case_of(steps)], [steps]).met is None
    assert gap_figure(1, [steps], None).met is None
    results = [Result("plain", "tiny", error="CapacityError: full"), Result("transformers", "tiny")]
    results[1].peers = [Peer("tiny", 1, 50.0, None), Peer("tiny", 8, 50.0, 2.0)]
    page = report_markdown({"card": "a card", "date": "today"}, results)
    assert "FAILED, so figures are missing:\n\n- plain, tiny: CapacityError: full\n" in page
    assert "| tiny | 1 | 50.0 | - |\n| tiny | 8 | 50.0 | 2.00x |" in page


# -- the script -------------------------------------------------------------------------------------------------------

OPTIONS = ["--shapes", "tiny", "--batches", "1,2", "--steps", "3", "--turns", "2", "--copy-bytes", "1000"]


def test_a_small_run(card: Card, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("x", [*OPTIONS, "--out", str(tmp_path)], lambda: card) == 0
    (file,), (page,) = tmp_path.glob("*.json"), tmp_path.glob("*.md")
    data, text = json.loads(file.read_text()), page.read_text()
    assert text in capsys.readouterr().out
    assert data["card"] == "a thread"
    assert data["copy_bandwidth"] == pytest.approx(2e6)
    assert f"torch {torch.__version__}" in data["versions"]
    results = {result["section"]: result for result in data["results"]}
    assert list(results) == list(SECTIONS)
    assert not any(result["error"] for result in results.values())
    cases = [(case["mode"], case["batch"]) for result in results.values() for case in result["cases"]]
    plain = [("plain", 1), ("plain", 2), ("plain, no overlap", 1)]
    assert cases == plain + [(f"EAGLE3 K=3, {n} accepted", batch) for batch in (1, 2) for n in range(4)]
    for result in results.values():
        for case in result["cases"]:
            assert case["step"] == pytest.approx(1e6 * TICK)
            assert case["over_floor"] == pytest.approx(case["step"] * 2e6 / 1e6 / case["step_bytes"])
    figures = {section: [figure["name"] for figure in result["figures"]] for section, result in results.items()}
    assert figures["sampling"] == ["added by temperature, top-k 50 and top-p 0.9, batch 8"]
    assert figures["rows"] == [f"step of 4 rows a request / of 1 row, batch {batch}" for batch in (1, 8)]
    (one, eight), (added,) = results["rows"]["figures"], results["sampling"]["figures"]
    assert one["values"] == eight["values"] == [1.0, 1.0]
    assert (one["limit"], one["met"], added["limit"], added["met"]) == (1.08, True, 100, True)
    assert [peer["batch"] for peer in results["transformers"]["peers"]] == [1, 2]
    formats = ["bf16", "fp8", "int8", "int8 g=128", "int4 g=128"]
    cases = [f"{name}, {rows}" for name in formats for rows in ("1 row: of copy", "1 row: torch", "65 rows: torch")]
    assert [name.partition(" bandwidth")[0].partition("'s")[0] for name in figures["linears"]] == cases
    assert {value for figure in results["linears"]["figures"][1::3] for value in figure["values"]} == {1.0}
    layer = 2 * (64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 96)  # bytes in bf16: one is more than is asked for
    assert results["linears"]["figures"][0]["values"] == pytest.approx([layer / TICK / 2e6] * 2, rel=1e-3)
    (share, *ratios) = results["attention"]["figures"]
    assert share["values"] == pytest.approx([2 * 256 * 40 / TICK / 2e6] * 2, rel=1e-3)
    assert [figure["values"] for figure in ratios] == [[1.0, 1.0]] * 3
    speeds = [case["tokens_per_second"] for case in results["plain"]["cases"]]
    for peer, speed in zip(results["transformers"]["peers"], speeds, strict=False):
        assert peer["ratio"] == pytest.approx(speed / peer["tokens_per_second"])


@pytest.mark.long
def test_a_section_that_fails_loses_no_other(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []

    def fail(bench: Any, result: Result) -> None:
        written.append(json.loads(next((tmp_path / "out").glob("*.json")).read_text()))
        bench.engine(result.shape, "plain")
        raise RuntimeError("no good")

    monkeypatch.setitem(SECTIONS, "sampling", fail)
    options = ["--only", "plain,sampling,rows", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert main("x", [*OPTIONS, *options, "--quick"], lambda: card) == 1
    assert [one["section"] for one in written[0]["results"]] == ["plain"]  # written before the next section begins
    (file,) = (tmp_path / "out").glob("*.json")
    results = json.loads(file.read_text())["results"]
    assert [one["error"] for one in results] == [None, "RuntimeError: no good", None]
    assert results[0]["cases"][0]["steps"] == 20
    assert len(results[2]["figures"]) == 2
    assert "sampling failed: RuntimeError: no good" in capsys.readouterr().err
    assert (tmp_path / "work" / "tiny" / "config.json").is_file()


def test_without_a_gpu_it_says_so_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("benchmarks/gpu.py: ")  # torch may warn before
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["--only", "columns"], ["--shapes", ""], ["--steps", "1"], ["--batches", "1,x"], ["--turns", "0"]]
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("x", arguments)
    assert "error:" in capsys.readouterr().err
