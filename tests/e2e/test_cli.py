"""The `trtspec` command, run as a person runs it, on the shipped demo models."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.turns import run_turns
from examples.demo.__main__ import Mode, table
from trtspec import LLM, SamplingParams
from trtspec.bench import adaptive
from trtspec.bench.adaptive import AGAIN, AUTO, PLAIN, Load, bench_adaptive, summary
from trtspec.bench.profile import Clock
from trtspec.cli import main
from trtspec.engine.batch import InputBuilder
from trtspec.engine.step import StepLoop
from trtspec.errors import RequestError
from trtspec.interop.reading import read_speculative_config

DEMO = Path(__file__).parents[2] / "examples" / "demo"
TARGET, DRAFT = str(DEMO / "target"), str(DEMO / "draft")
NO_TEXT = str(DEMO / "target" / "model.safetensors")
PROMPT = "import os\n\ndef main():\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `trtspec ARGUMENTS`."""
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_installed_command_answers() -> None:
    """The console script exists, and its imports work in a process of its own."""
    command = [str(Path(sys.executable).with_name("trtspec")), "info", TARGET]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "LlamaForCausalLM" in done.stdout


def test_info_names_architecture_memory_and_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info", TARGET)
    assert status == 0
    for words in (
        "LlamaForCausalLM",
        "4096 bytes per token",
        "speculation: ngram",
        "speculation: eagle3",
        "speculation: mtp",
        "not known",
    ):
        assert words in " ".join(out.split())  # however the lines are broken


def test_generate_prints_the_same_text_with_and_without_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("generate", "--model", TARGET, "--prompt", PROMPT, "--max-tokens", "24", "--temperature", "0")
    _, plain, _ = run(capsys, *base)
    _, drafted, note = run(capsys, *base, "--spec-model", DRAFT, "--spec-method", "draft_model", "--spec-tokens", "3")
    assert plain == drafted
    assert plain.strip()
    assert re.search(
        r"^acceptance length \d\.\d\d, per position .*, \d\.\d\d tokens per step, \d+ steps$", note, re.MULTILINE
    )


def test_generate_json_equals_the_python_api(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-tokens", "12", "--temperature", "0.8", "--seed", "7", "--n", "2", "--json")
    _, out, _ = run(capsys, "generate", "--model", TARGET, "--prompt", PROMPT, *options)
    records = [json.loads(line) for line in out.splitlines()]
    with LLM(TARGET) as llm:
        output = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.8, seed=7, n=2))[0]
    assert [record["token_ids"] for record in records] == [list(sample.token_ids) for sample in output.outputs]
    assert [record["text"] for record in records] == [sample.text for sample in output.outputs]
    assert [(record["acceptance_length"], record["tokens_per_step"]) for record in records] == [(None, 1.0)] * 2
    assert [record["index"] for record in records] == [0, 1]


def test_spec_may_be_json_or_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    base = ("generate", "--model", TARGET, "--prompt", PROMPT, "--max-tokens", "16", "--temperature", "0", "--json")
    lines = [run(capsys, *base, "--spec", text)[1] for text in (json.dumps(spec), str(tmp_path / "spec.json"))]
    assert lines[0] == lines[1]
    assert len(json.loads(lines[0])["acceptance_per_position"]) == 2


def test_bench_decode_writes_every_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    shape = ("--batch", "2", "--input-len", "16", "--output-len", "12", "--repeats", "1", "--random-prompts")
    spec = ("--spec-method", "draft_model", "--spec-model", DRAFT, "--spec-tokens", "2")
    status, out, _ = run(capsys, "bench", "decode", "--model", TARGET, *shape, *spec, "--json", str(file))
    result = json.loads(file.read_text())
    assert status == 0
    assert "speed-up" in out
    assert result["lossless"] is True
    assert result["tok_s"] > 0
    assert result["speedup"] == pytest.approx(result["tok_s"] / result["plain_tok_s"])  # one repeat: the same figures
    assert 1 <= result["tokens_per_step"] < result["acceptance_length"] <= 3  # the last steps have no room for drafts
    assert len(result["acceptance_per_position"]) == 2
    # A step has one launch of the target and two of the draft, or fewer where K is cut short. Each launch reads all
    # weights of its model and none twice, because the heads are tied.
    target, draft = ((DEMO / name / "model.safetensors").stat().st_size for name in ("target", "draft"))
    assert 0.9 * target < result["weight_bytes_per_step"] < 1.1 * (target + 2 * draft)
    for name in ("read_gbs", "roofline_ratio", "host_us_per_step", "load_s", "first_token_s", "peak_rss_bytes"):
        assert result[name] > 0, name
    assert result["versions"]["torch"]


def test_bench_adaptive_compares_auto_with_each_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, png = tmp_path / "result.json", tmp_path / "result.png"
    trace = ("--clients", "1", "2", "--temperatures", "0", "1.5", "--fixed", "2", "--answers", "1")
    shape = ("--input-len", "12", "--output-len", "8", "--repeats", "2", "--backend", "eager")
    base = ("bench", "adaptive", "--model", TARGET, *trace, *shape)
    spec = json.dumps({"method": "ngram", "enable_adaptive_verification": True})  # does not apply to the fixed numbers
    with monkeypatch.context() as patch:
        wishes: list[Any] = []
        patch.setattr(
            adaptive, "LLM", lambda model, wish, **options: wishes.append(wish) or LLM(model, wish, **options)
        )
        status, out, _ = run(capsys, *base, "--spec", spec, "--json", str(file), "--png", str(png))
    assert [wish and read_speculative_config(wish).enable_adaptive_verification for wish in wishes] == [
        None, None, False, False,
    ]  # fmt: skip
    assert status == 0
    assert "output equals plain: yes" in out
    with pytest.raises(RequestError, match="1 prompts for 2 clients; give at least one for each"):
        bench_adaptive(TARGET, {"method": "ngram"}, [[1]], 4, clients=(2,))
    assert png.read_bytes().startswith(b"\x89PNG")
    result = strict_json(file)
    assert result["lossless"] is True
    assert [(load["clients"], load["temperature"]) for load in result["loads"]] == [(1, 0), (1, 1.5), (2, 0), (2, 1.5)]
    for load in result["loads"]:
        assert list(load["speedups"]) == ["K = 2", "auto"]
        assert min(*load["speedups"].values(), load["auto_over_best"], load["plain_tok_s"], load["null"]) > 0
        assert load["auto_over_best"] <= load["speedups"]["auto"] + 1e-9  # plain decoding is one of the best
    assert "bench adaptive measures speculation" in run(capsys, *base)[2]
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "def f():"}\n')
    message = run(capsys, *base, "--spec-method", "ngram", "--prompts", str(few))[2]
    assert "has 1 prompts, and 2 clients with 1 answers each ask 2" in message
    assert "--fixed 0: each must be" in run(capsys, *base, "--spec-method", "ngram", "--fixed", "0")[2]


def test_a_summary_has_the_best_number_and_the_null() -> None:
    speeds = {
        PLAIN: [10.0, 20.0, 40.0],
        AGAIN: [9.0, 20.0, 44.0],
        "K = 1": [20.0, 30.0, 40.0],
        AUTO: [15.0, 30.0, 20.0],
    }
    found = summary(Load(8, 0.5, speeds, [0.5, 1.0, 3.0]), ["K = 1"])
    assert (found["plain_tok_s"], found["drafts_per_token"]) == (20.0, 1.0)
    assert found["speedups"] == {"K = 1": 1.5, AUTO: 1.5}
    assert found["auto_over_best"] == 0.75  # of 0.75, 1 and 0.5 times K = 1
    assert found["null"] == pytest.approx(0.95)
    two = Load(8, 0.5, {PLAIN: [100.0, 100.0], AGAIN: [10.0, 100.0], AUTO: [80.0, 80.0]}, [1.0])
    assert summary(two, [])["null"] == pytest.approx(0.325)  # between the two


def strict_json(file: Path) -> Any:
    """Load a JSON file. AssertionError for NaN, which is no JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(file.read_text(), parse_constant=refuse)


def test_a_figure_that_there_is_not_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of drafts are null where there are none: in plain decoding, and in lookups in prompts of random ids."""
    file, shape = tmp_path / "result.json", ("--random-prompts", "--input-len", "8", "--output-len", "4")
    lookup, outputs = ("--spec-method", "ngram", "--spec-tokens", "1"), ("--json", str(file), "--png")
    prompts = ("--num-prompts", "1", "--max-k", "1")
    assert (
        run(capsys, "bench", "acceptance", "--model", TARGET, *shape, *prompts, *lookup, *outputs, str(file) + ".png")[
            0
        ]
        == 0
    )
    (row,) = strict_json(file)["by_k"]
    assert (row["acceptance_length"], row["tokens_per_step"], row["num_drafts"], row["steps"]) == (None, 1.0, 0, 3)
    status, out, _ = run(
        capsys, "bench", "decode", "--model", TARGET, *shape, "--repeats", "1", *lookup, "--json", str(file)
    )
    assert status == 0
    assert re.search(r"acceptance length +-\s", out)
    assert re.search(r"tokens per step +1\.00\s", out)
    assert run(capsys, "bench", "decode", "--model", TARGET, *shape, "--profile", "--json", str(file))[0] == 0
    assert strict_json(file)["plain"]["acceptance_length"] is None


def test_the_demo_tells_steps_with_drafts_from_those_without() -> None:
    modes = [Mode(name, "plain", tokens=[[1]], times=[[1.0]]) for name in ("plain", "draft model")]
    modes[0].stats.observe(1, 0, 4)
    modes[1].stats.observe(3, 3, 3)
    modes[1].stats.observe(1, 0, 3)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(modes, "greedy"))
    rows = [line.split("│")[1:-1] for line in console.export_text().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[3:6]] for row in rows] == [
        ["1.00", "-", "-"],
        ["2.00", "3.00", "100 100 0 %"],
    ]


def test_profiles_sum_up_to_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The phases of a step add up to its total, also on eager, where the draft layers' passes are counted separately.

    Afterwards no method is left wrapped.
    """
    before = dict(vars(StepLoop)), dict(vars(InputBuilder))
    file = tmp_path / "result.json"
    shape = ("--input-len", "16", "--output-len", "12", "--random-prompts", "--profile", "--json", str(file))
    spec = ("--spec-method", "eagle3", "--spec-model", str(DEMO / "eagle3"), "--spec-tokens", "2")
    assert run(capsys, "bench", "decode", "--model", TARGET, *shape, *spec)[0] == 0
    results = json.loads(file.read_text())
    assert list(results) == ["plain", "speculative"]
    for name, result in results.items():
        phases = result["us_per_step"]
        total = phases.pop("total")
        assert sum(phases.values()) == pytest.approx(total)
        assert (phases["draft"] > 0) == (name == "speculative")
        assert all(phases[phase] > 0 for phase in ("inputs", "verify", "accept", "deliver", "host"))
    assert (dict(vars(StepLoop)), dict(vars(InputBuilder))) == before


def test_a_clock_counts_a_phase_inside_another_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock()
    for name in ("verify", "inputs", None, None):
        clock.turn(name)
    assert clock.seconds == {"verify": 1.0 + 4.0, "inputs": 2.0}


def test_code_prompts_come_from_a_given_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def f(x):\n    return x + 1\n" * 40)
    shape = ("--input-len", "32", "--output-len", "4", "--repeats", "1", "--prompts", str(tmp_path))
    assert run(capsys, "bench", "decode", "--model", TARGET, *shape)[0] == 0
    status, _, err = run(capsys, "bench", "decode", "--model", TARGET, *shape, "--batch", "2")
    assert status == 1
    assert "only 1 texts of 32 tokens for --batch 2" in err
    (tmp_path / "one.jsonl").write_text('{"prompt": "x"}\n')
    status, _, err = run(capsys, "bench", "decode", TARGET, "--prompts", str(tmp_path / "one.jsonl"), "--batch", "2")
    assert status == 1
    assert "one.jsonl has 1 prompts for --batch 2" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("info", "no/such/folder"), "not a folder"),
        (("generate", "--model", TARGET), "--prompt"),
        (("generate", "--model", TARGET, "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("generate", "--model", TARGET, "--prompt-ids", "1,x"), "--prompt-ids"),
        (("generate", "--model", TARGET, "--prompt", "x", "--show-drafts", "--json"), "leave one out"),
        (("generate", "--model", TARGET, "--prompt", "x", "--spec", '{"metod": "ngram"}'), "metod"),
        (("generate", "--model", TARGET, "--prompt", "x", "--spec", "[1]"), "No such file"),
        (("generate", "--model", TARGET, "--prompt", "x", "--spec-method", "eagle3", "--spec-tokens", "1"), "model"),
        (("generate", "--model", TARGET, "--prompt", "x", "--spec", '{"a":' + "[" * 10**5), "neither a JSON object"),
        (("generate", "--model", TARGET, "--prompt", "x", "--spec", NO_TEXT), "neither a JSON object nor a file"),
        (("generate", "--model", TARGET, "--prompt-file", NO_TEXT), "no text in UTF-8"),
        (("bench", "decode", "--model", TARGET, "--batch", "0"), "--batch"),
        (("bench", "decode", "--model", TARGET, "--output-len", "1"), "output_len = 1 times no step"),
        (("bench", "decode", "--model", TARGET, "--output-len", "1", "--profile"), "output_len = 1 times no step"),
    ],
)
def test_errors_are_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    status, _, err = run(capsys, *arguments)
    assert status == 1
    assert words in err
    assert err.startswith("trtspec: ")
    assert len(err.strip().splitlines()) == 1


def test_engines_take_turns_step_by_step() -> None:
    """Steps with prompts and last steps do not count. A drafter that is always right halves the number of steps."""
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    speculation = {"method": "draft_model", "model": TARGET, "num_speculative_tokens": 1}
    with LLM(TARGET, backend="eager") as plain, LLM(TARGET, speculation, backend="eager") as drafting:
        rows, different = run_turns({"plain": plain, "drafts": drafting}, prompts, 2, 9, 3, lambda what: None)
    assert not different
    assert [(row["batch"], row["engine"], row["steps"]) for row in rows] == [(2, "plain", 21), (2, "drafts", 9)]
    assert rows[0]["token_over_plain"] == 1
    assert all(row["host_ms"] > 0 and row["token_over_plain"] > 0 for row in rows)
