"""benchmarks/peers.py without the peers: GGUF files, checkpoints, contests and figures."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import checkpoints, notes, runner
from benchmarks.peers import main as peers
from benchmarks.peers.checkpoints import CIRCLE, DEMO, Model, Shape, open_model, write_checkpoint
from benchmarks.peers.contests import NGRAM, Contest, Contestant, Group, groups
from benchmarks.peers.gguf_file import gguf_name, interleave_rope, read_safetensors, write_gguf
from benchmarks.peers.main import main
from benchmarks.peers.process import Worker
from benchmarks.peers.results import Start, as_json, markdown, rows_table, starts_table, summarise
from benchmarks.peers.runner import Runner
from tests.unit.peer_runs import OURS, QUANTISED, ROOT, THEIRS, run
from trtspec import LLM, SamplingParams

# -- GGUF -------------------------------------------------------------------------------------------------------------


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]], bytes]:
    """Return the metadata values, (shape, type, offset) of each tensor, and the data section."""
    data = file.read_bytes()
    assert data[:4] == b"GGUF"
    position = 4

    def take(form: str) -> Any:
        nonlocal position
        (value,) = struct.unpack_from("<" + form, data, position)
        position += struct.calcsize("<" + form)
        return value

    def text() -> str:
        nonlocal position
        size = take("Q")
        position += size
        return data[position - size : position].decode()

    assert take("I") == 3
    num_tensors, num_values = take("Q"), take("Q")
    readers = {4: lambda: take("I"), 6: lambda: take("f"), 8: text}
    values = {text(): readers[take("I")]() for _ in range(num_values)}
    tensors = {}
    for _ in range(num_tensors):
        name, dims = text(), take("I")
        tensors[name] = (tuple(take("Q") for _ in range(dims)), take("I"), take("Q"))
    return values, tensors, data[-(-position // 32) * 32 :]


def test_gguf_holds_the_checkpoint(tmp_path: Path) -> None:
    write_gguf(DEMO / "target", tmp_path / "demo.gguf")
    values, infos, data = read_gguf(tmp_path / "demo.gguf")
    assert values["llama.attention.head_count_kv"] == 2
    assert values["llama.vocab_size"] == 4096
    source = read_safetensors(DEMO / "target")
    assert len(infos) == len(source)
    for name, tensor in source.items():
        shape, kind, offset = infos[gguf_name(name)]
        assert offset % 32 == 0
        if tensor.bits.ndim == 1:
            stored: Any = np.frombuffer(data, "<f4", shape[0], offset)
            assert kind == 0
            expected = torch.from_numpy(tensor.bits.astype(np.int16)).view(torch.bfloat16).float().numpy()
        else:
            assert (kind, shape) == (30, tensor.bits.shape[::-1])
            stored = np.frombuffer(data, "<u2", tensor.bits.size, offset).reshape(tensor.bits.shape)
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
            expected = tensor.bits if heads is None else interleave_rope(tensor.bits, heads)
        assert np.array_equal(stored, expected), name


def test_interleaved_rows_rotate_like_halves() -> None:
    heads, width = 3, 8
    x = np.random.default_rng(0).normal(size=(heads * width, 1))
    angle = 0.3 ** np.arange(width // 2)
    cos, sin = np.cos(angle), np.sin(angle)
    low, high = np.split(x.reshape(heads, width), 2, axis=1)
    halves = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=1).reshape(-1, 1)
    pairs = interleave_rope(x, heads).reshape(heads, width // 2, 2)
    rotated = np.stack(
        [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin], axis=-1
    ).reshape(-1, 1)
    np.testing.assert_allclose(rotated, interleave_rope(halves, heads))


def test_gguf_refuses_what_it_cannot_express(tmp_path: Path) -> None:
    config = json.loads((DEMO / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    with pytest.raises(ValueError, match="without rope scaling and biases"):
        write_gguf(tmp_path, tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="midlayer"):
        gguf_name("midlayer.mlp.up_proj.weight")


@pytest.mark.skipif("LLAMA_PYTHON" not in os.environ, reason="LLAMA_PYTHON: no environment with llama-cpp-python")
def test_llama_cpp_reads_the_file_and_writes_the_same(tmp_path: Path) -> None:
    worker = Worker(
        "llama.cpp",
        os.environ["LLAMA_PYTHON"],
        "benchmarks.peers.in_llama",
        {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        tmp_path / "log",
    )
    model = open_model("demo", tmp_path)
    prompts = model.prompts(4, 24)
    limits = {"max_batch": 4, "max_len": 64, "max_num_tokens": 256, "tied": True, "first_prompt": prompts[0]}
    files = {"model": str(model.folder), "gguf": str(tmp_path / "gguf")}
    try:
        made = worker.call("convert", 60, **files, format="BF16")
        quantised = Path(worker.call("convert", 60, **files, format="Q8_0")["file"])
        worker.call("load", 60, **limits, **made, format="BF16", speculation=None)
        theirs = worker.call("generate", 60, prompts=prompts, output_len=16)["outputs"]
        worker.call("load", 60, **limits, **made, format="BF16", speculation=NGRAM)
        looked_up = worker.call("generate", 60, prompts=prompts[:1], output_len=16)["outputs"]
    finally:
        worker.kill()
    assert theirs == generate(model.folder, prompts, 16)
    assert looked_up == theirs[:1]
    assert [file.stem for file in sorted(quantised.parent.iterdir())] == ["BF16", quantised.stem]


# -- checkpoints and contests -----------------------------------------------------------------------------------------


def generate(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    with LLM(folder, max_batch_size=len(prompts)) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.slow
def test_a_queue_gives_the_texts_of_all_at_once(tmp_path: Path) -> None:
    model = open_model("demo", tmp_path)
    prompts = [[(97 * b + 31 * i) % 4000 for i in range(12)] for b in range(5)]
    limits = {"max_batch": 5, "max_len": 64, "max_num_tokens": 256, "first_prompt": prompts[0], "format": "bf16"}
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    worker = Worker("trtspec", sys.executable, "benchmarks.peers.in_trtspec", paths, tmp_path / "log")
    try:
        worker.call("load", 120, model=str(model.folder), speculation=None, **limits)
        replies = [worker.call("generate", 60, prompts=prompts, output_len=9, at_once=n) for n in (None, 1, 2)]
    finally:
        worker.kill()
    for reply in replies:
        assert reply["outputs"] == replies[0]["outputs"]
        assert (reply["first_tokens"], reply["request_steps"]) == (5, 5 * 8)
    assert [len(output) for output in replies[0]["outputs"]] == [9] * 5


def test_random_weights_count_in_circles(tmp_path: Path) -> None:
    shape = Shape(hidden=128, layers=3, intermediate=256, heads=2, kv_heads=1, vocab=40 * CIRCLE)
    write_checkpoint(shape, tmp_path / "small")
    prompts = [[700, 3, 9], [5, CIRCLE + 30]]
    outputs = generate(tmp_path / "small", prompts, 2 * CIRCLE)
    for prompt, output in zip(prompts, outputs, strict=True):
        base = prompt[-1] - prompt[-1] % CIRCLE
        assert output == [base + (prompt[-1] + 1 + i) % CIRCLE for i in range(2 * CIRCLE)]
    model = Model("small", tmp_path / "small", None, None)
    per_layer = 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256 + 2 * 128)
    assert model.weight_bytes == 3 * per_layer + 2 * (128 + 128 * shape.vocab)  # without the embedding


def test_checkpoints_are_kept_until_their_making_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoints.SHAPES, "40M", Shape(64, 1, 64, heads=1, kv_heads=1, vocab=2 * CIRCLE))
    weights = open_model("40M", tmp_path).folder / "model.safetensors"
    first = weights.stat().st_mtime_ns
    (tmp_path / "40M.tmp").mkdir()  # left by a run that was killed
    open_model("40M", tmp_path)
    assert weights.stat().st_mtime_ns == first
    monkeypatch.setattr(checkpoints, "CIRCLE", 16)
    open_model("40M", tmp_path)
    second = weights.stat().st_mtime_ns
    assert second > first
    monkeypatch.setitem(checkpoints.SHAPES, "40M", Shape(128, 1, 64, heads=2, kv_heads=1, vocab=2 * CIRCLE))
    assert open_model("40M", tmp_path).config["hidden_size"] == 128
    assert [folder.name for folder in tmp_path.iterdir()] == ["40M"]


def test_llama_cpp_files_are_of_one_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    work = Runner(tmp_path, {}, torch.get_num_threads(), 1, lambda what: None)
    model, other = Model("40M", checkpoint, None, None), Model("246M", checkpoint, None, None)
    first = work._gguf(model)
    for folder in (first, work._gguf(other)):
        folder.mkdir(parents=True)
    assert work._gguf(model) == first
    (checkpoint / "config.json").write_text("{ }")
    assert work._gguf(model) != first
    assert [folder.name.split("-")[0] for folder in (tmp_path / "gguf").iterdir()] == ["246M"]


def test_contests_of_a_model() -> None:
    demo = open_model("demo", Path("unused"))
    random = Model("40M", Path("unused"), None, None)
    everything = {"plain", "batch8", "prefill", "ngram", "draft", "eagle3", "startup"}
    assert [group.name for group in groups(demo, everything, {"vllm"}, 64)] == ["decoding", "ngram", "draft", "eagle3"]
    assert [group.name for group in groups(random, everything, {"vllm"}, 64)] == ["decoding", "ngram"]
    vllm = [one.name for one in groups(demo, {"plain"}, {"vllm"}, 64)[0].contestants if one.peer == "vllm"]
    assert vllm == ["vLLM", "vLLM in-process"]
    assert (
        len(groups(demo, {"plain"}, {"vllm"}, 64, ["in-process"])[0].contestants)
        == len(groups(demo, {"plain"}, set(), 64)[0].contestants) + 1
    )
    (group,) = groups(random, {"startup"}, {"llama"}, 64)
    assert group.contests == ()
    assert {one.peer for one in group.contestants} == {"trtspec", "llama"}


# -- figures ----------------------------------------------------------------------------------------------------------


def test_figures() -> None:
    runs = [run(OURS, r, seconds, [1, 2]) for r, seconds in enumerate((1.0, 2.0, 4.0))]
    runs += [run(THEIRS, r, seconds, [1, 3]) for r, seconds in enumerate((2.0, 2.0, 2.0))]
    runs += [run(QUANTISED, 0, 0.5, [1, 2])]
    starts = [Start("40M", "decoding", one, 0.5, 5_000_000, 10**8) for one in (OURS, THEIRS, QUANTISED)]
    ours, theirs, quantised = summarise(runs, starts)
    assert ours.tokens_per_second == 50.0  # 100 tokens after the first in 2 s, the median
    assert ours.trtspec_ratio == 1.0
    assert ours.bandwidth_share == pytest.approx(0.25)  # 5 ms to read the weights, 20 ms a step
    assert ours.bandwidth_range == pytest.approx((0.125, 0.5))
    assert ours.tokens_per_step == 1.0
    assert theirs.trtspec_ratio == 1.0  # the median of 2, 1 and 1/2
    assert (theirs.same_outputs, ours.same_outputs) == (0, 1)
    assert quantised.same_outputs is None
    assert math.isnan(quantised.trtspec_ratio)
    header, cells = rows_table([ours, quantised])
    assert cells[1] == [
        "40M",
        "plain, batch 1",
        "llama.cpp Q8_0",
        "200.0",
        "-",
        "5 MB",
        "100% (100% .. 100%)",
        "1.00",
        "-",
    ]
    assert markdown(header, cells).count("\n") == 4
    assert starts_table(starts)[1][0] == ["40M", "decoding", "trtspec", "0.50 s", "100 MB", "5 MB"]
    assert (
        json.loads(json.dumps(as_json(runs, starts, [quantised]), allow_nan=False))["rows"][0]["trtspec_ratio"] is None
    )


def test_prefill_counts_prompt_tokens() -> None:
    prefill = run(OURS, 0, 0.0, [1], Contest("prefill", 1, 1024, 1))
    assert prefill.tokens_per_second == 1024.0
    assert math.isnan(prefill.bandwidth_share(1000))


def test_bytes_of_a_step_are_those_of_a_step_without_drafts() -> None:
    drafted = Contestant("vllm", speculation=NGRAM)
    starts = [Start("40M", "ngram", drafted, 0.5, 5_000_000)]
    (row,) = summarise([run(drafted, 0, 1.0, [1])], starts)
    assert row.step_bytes is None
    assert rows_table([row])[1][0][5:7] == ["-", "-"]
    assert starts_table(starts)[1][0][-2:] == ["-", "-"]
    data = json.loads(json.dumps(as_json([], starts, [row]), allow_nan=False))
    assert data["rows"][0]["bandwidth_range"] == [None, None]


def test_results_carry_every_note_and_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fake(Runner):
        def __post_init__(self) -> None:
            self.probe = runner.Probe()

        def run(self, model: Model, group: Group) -> None:
            self.starts.append(Start(model.name, group.name, OURS, 0.5, 5_000_000))
            self.runs.append(run(OURS, 1, 1.0, [1, 2]))
            self.failures.append("something failed")

    monkeypatch.setattr(peers, "Runner", Fake)
    files = {name: tmp_path / f"peers.{name}" for name in ("markdown", "json")}
    arguments = ["--only", "vllm", "--vllm-python", sys.executable, "--model", "demo", "--what", "draft"]
    arguments += [text for name, file in files.items() for text in (f"--{name}", str(file))]
    assert main("x", arguments) == 1
    written, shown = files["markdown"].read_text(), capsys.readouterr().out
    data = json.loads(files["json"].read_text())
    expected = [*notes.ALWAYS, notes.VLLM + "Torch's OpenMP serves.", notes.WHAT["draft"], "something failed"]
    assert sorted(data["notes"]) == sorted(expected)
    for line in (*expected, f"command: python benchmarks/peers.py {' '.join(arguments)}", f"commit: {data['commit']}"):
        assert f"- {line}\n" in written
        assert line in shown
    assert "what compiling costs, once, in `trtspec build`, is not in it" in written
    assert notes.RANDOM not in written
    assert notes.RANDOM in notes.notes(["demo", "40M"], [], {})


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_commit_is_said_only_of_this_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(notes, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert notes.origin("a.py", ["--what", "a b"]) == {"commit": "none", "command": "python a.py --what 'a b'"}
    (tmp_path / "file").write_text("1")
    git("init")
    git("add", "file")
    git("commit", "-m", "x")
    commit = notes.origin("a.py", [])["commit"]
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert notes.origin("a.py", [])["commit"] == f"{commit}, with changes"
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(notes, "ROOT", tmp_path / "inner")
    assert notes.origin("a.py", [])["commit"] == "none"
