"""Compiled engines have the same outcomes as eager, speculation changes nothing, and folders say what is wrong.

One conformance suite serves both backends. It runs the same requests in every mode, packed in a small cache and one at
a time. Ids, text and reasons equal those of plain decoding on the same backend bit for bit, and those of eager.
"""

from __future__ import annotations

import itertools
import json
import mmap
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import compiled_engines
from tests.e2e.compiled_engines import (
    SHAPE,
    K,
    assert_speculation_changes_nothing,
    assert_words_are_those_of_eager,
    edited,
    in_spec,
    speculation,
    with_other_kernels,
)
from tests.e2e.conformance import CASES, LIMITS, TIGHT, packed
from tests.e2e.near_ties import first_gaps
from tests.e2e.tiny import VOCAB, Outcome, perturbed, run_alone
from trtspec import LLM, SamplingParams
from trtspec.backends.aoti.executable import AotiExecutable
from trtspec.backends.export import example_batch
from trtspec.backends.graph_io import graph_outputs
from trtspec.backends.weight_file import load_weight_file
from trtspec.build.engine_folder import FORMAT, EngineFolder, machine
from trtspec.cli import main
from trtspec.errors import CheckpointError, ConfigError, EngineError
from trtspec.text import Tokenizer

copy, models = compiled_engines.copy, compiled_engines.models
engine = compiled_engines.engine
plain = compiled_engines.plain

BUILT = [("none", "float32"), ("eagle3", "float32")]  # the graph of ngram is that of none
LONG = [(mode, "float32") for mode in ("ngram", "scheduled", "draft")]
LONG += [(mode, "bfloat16") for mode in ("none", "eagle3", "ngram", "draft")]


@pytest.mark.parametrize(("mode", "dtype"), [*BUILT, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)])
def test_speculation_changes_nothing(
    engine: Callable[[str, str], Path], plain: Callable[[str, str], list[Outcome]], mode: str, dtype: str
) -> None:
    """Packed requests have the bits of compiled plain decoding of each alone, with other graphs and other rows."""
    with LLM(engine(mode, dtype), **TIGHT) as llm:
        assert isinstance(llm.engine.loop.target.inner, AotiExecutable)
        assert_speculation_changes_nothing(llm, plain("aoti", dtype), mode)


@pytest.mark.parametrize(
    "mode",
    ["none", "eagle3", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("ngram", "draft", "scheduled"))],
)
def test_the_words_are_those_of_eager(
    engine: Callable[[str, str], Path], plain: Callable[[str, str], list[Outcome]], models: Path, mode: str
) -> None:
    assert_words_are_those_of_eager(engine(mode, "float32"), models, mode, plain("eager", "float32"))


@pytest.mark.long
def test_a_draft_model_inside_the_graph(
    engine: Callable[[str, str], Path], plain: Callable[[str, str], list[Outcome]], models: Path
) -> None:
    words = plain("eager", "float32")
    assert_words_are_those_of_eager(engine("draft_inside", "float32"), models, "draft_inside", words)


NEAR_TIE = 2.0
"""In ulps of bf16. Three layers round some ten times on the way to a logit, in either direction."""


@pytest.mark.long
def test_half_precision_differs_in_near_ties_at_most(
    plain: Callable[[str, str], list[Outcome]], models: Path, tmp_path: Path
) -> None:
    """In bf16, ids equal eager's or first differ where rounding explains it. A model that is merely similar fails this.

    Speculation changes no bit of either: test_speculation_changes_nothing and, for eager, test_lossless show that.
    """
    ours = plain("eager", "bfloat16")
    eager = LLM(models / "target", dtype="bfloat16", num_kv_blocks=128, **LIMITS)
    gaps = first_gaps(eager.engine, CASES, ours, plain("aoti", "bfloat16"))
    print(f"{len(gaps)} of {len(CASES)} outputs differ, first at gaps of {sorted(gaps.values())} ulps")
    assert max(gaps.values(), default=0.0) <= NEAR_TIE

    similar = LLM(perturbed(models / "target", 0.02, tmp_path), dtype="bfloat16", num_kv_blocks=128, **LIMITS)
    assert max(first_gaps(eager.engine, CASES, ours, run_alone(similar.engine, CASES)).values()) > 2 * NEAR_TIE


@pytest.mark.long
def test_every_draft_length_had_its_graph(engine: Callable[[str, str], Path]) -> None:
    """Each draft length of a schedule has graphs of its own. A step runs the smallest one that is long enough."""
    folder = engine("scheduled", "float32")
    llm = LLM(folder, **TIGHT)
    executable = llm.engine.loop.target.inner
    assert isinstance(executable, AotiExecutable)
    assert executable.compiled.draft_lens == (0, 1, K)
    used: Counter[tuple[int, bool]] = Counter()

    def watched(kind: tuple[int, bool], run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensors: used.update([kind]) or run(tensors)

    for graph in executable._graphs:
        graph.run = watched((graph.draft_len, graph.uniform), graph.run)
    packed(llm)
    assert set(used) == set(itertools.product((0, 1, K), (False, True)))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_uniform_graphs_give_the_bits_of_ragged_ones(engine: Callable[[str, str], Path], dtype: str) -> None:
    """Uniform and ragged graphs return the same bits, KV included, for sampled rows with every filter and ban."""
    executable = LLM(engine("eagle3", dtype), **TIGHT).engine.loop.target.inner
    graphs = list(executable._graphs)
    for length in executable.compiled.draft_lens:
        inputs = example_batch(length, LIMITS["block_size"], uniform=True)
        inputs = replace(inputs, input_ids=torch.arange(inputs.input_ids.shape[0]) % VOCAB)
        inputs = replace(inputs, spec=replace(inputs.spec, draft_tokens=inputs.input_ids.view(2, -1)[:, 1:].clone()))
        results = []
        for uniform in (False, True):
            executable._graphs = [g for g in graphs if g.uniform == uniform]
            for layer in executable.kv:
                for tensor in layer:
                    tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view_as(tensor))
            outputs = graph_outputs(executable.run(inputs), executable.compiled.outputs)
            results.append([*outputs.values(), *(tensor.clone() for layer in executable.kv for tensor in layer)])
        assert all(torch.equal(ragged, uniform) for ragged, uniform in zip(*results, strict=True))


@pytest.mark.long
def test_hidden_states_are_those_of_eager(engine: Callable[[str, str], Path], models: Path, tmp_path: Path) -> None:
    """SAVE_HIDDEN_STATES runs compiled, too, and saves the states of eager."""
    from safetensors.torch import load_file

    saved = {}
    for backend in ("aoti", "eager"):
        out = models / "saved"
        shutil.rmtree(out, ignore_errors=True)
        if backend == "aoti":
            llm = LLM(engine("hidden", "float32"), **TIGHT)
        else:
            llm = LLM(models / "target", speculation("hidden", models), **LIMITS, **TIGHT)
        with llm:
            llm.generate([[1, 2, 3, 4], [5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
        saved[backend] = {file.name: load_file(file) for file in sorted(out.glob("*.safetensors"))}
    assert saved["aoti"].keys() == saved["eager"].keys() != set()
    for name, tensors in saved["aoti"].items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, saved["eager"][name][key], rtol=1e-5, atol=1e-5)


# -- folders ----------------------------------------------------------------------------------------------------------


def test_the_folder_says_what_it_is(engine: Callable[[str, str], Path], models: Path) -> None:
    data = json.loads((engine("eagle3", "float32") / "config.json").read_text())
    assert data["pretrained_config"] == json.loads((models / "target" / "config.json").read_text())
    assert data["build_config"]["max_batch_size"] == LIMITS["max_batch_size"]
    assert data["speculative_config"]["num_speculative_tokens"] == K
    assert set(data["executables"]) == {"target"}
    assert {"target/weights.safetensors", f"target/ragged_k{K}.pt2", "tokenizer.json"} <= set(data["files"])


def test_a_moved_folder_runs_without_its_checkpoints(copy: Path) -> None:
    """A moved folder runs without its checkpoints. `trtspec verify`, which hashes every file, accepts it."""
    assert main(["verify", str(copy)]) == 0
    with LLM(copy, **TIGHT) as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=4, seed=0), use_tqdm=False)[0].outputs[0].text


def test_prompts_are_those_of_the_checkpoint(engine: Callable[[str, str], Path], models: Path) -> None:
    """Tokenizer, special tokens and every chat template are those of the checkpoint."""
    ours, theirs = (Tokenizer.from_folder(folder) for folder in (engine("none", "float32"), models / "target"))
    assert ours is not None
    assert theirs is not None
    assert ours.chat_templates == theirs.chat_templates
    assert set(ours.chat_templates) == {"default", "tool_use"}
    assert ours.special_tokens == theirs.special_tokens
    assert ours.encode("abc") == theirs.encode("abc")


def test_verify_asks_whether_the_graphs_can_run_here(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_other_kernels(copy)
    assert main(["verify", str(copy)]) == 1
    assert "compiled for other C++ kernels" in capsys.readouterr().err


def test_a_flipped_bit_is_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "target" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert main(["verify", str(copy)]) == 1
    assert "target/weights.safetensors is not what was built" in capsys.readouterr().err


def blanked(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "target" / f"ragged_k{K}.pt2").unlink(), r"ragged_k\d\.pt2 is missing"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), r"tokenizer\.json has 2 bytes, not"),
        (lambda f: blanked(f / "target" / f"ragged_k{K}.pt2"), r"ragged_k\d\.pt2 is damaged .*rebuild the engine"),
        (lambda f: edited(f, trtspec_engine=99), "format 99.*rebuild it with trtspec build"),
        (lambda f: edited(f, machine={**machine("aoti"), "torch": "1.0"}), "built for torch 1.0, this is"),
        (
            lambda f: edited(f, machine={**machine("aoti"), "trtspec": "0"}),
            "built for trtspec 0, this is.*rebuild it here",
        ),
        (lambda f: (f / "config.json").write_text(json.dumps({"trtspec_engine": FORMAT})), "config.json lacks machine"),
        (lambda f: edited(f, executables={"target": {}}), "does not describe its graphs.*rebuild"),
        (with_other_kernels, "compiled for other C.. kernels than those built here; rebuild it"),
    ],
    ids=["missing", "size", "blanked", "format", "torch", "version", "truncated", "graphs", "kernels"],
)
def test_damage_is_named(copy: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(copy)
    with pytest.raises(CheckpointError, match=message):
        LLM(copy, tokenizer=None)


def test_another_cpu_is_refused(copy: Path) -> None:
    data = json.loads((copy / "config.json").read_text())
    data["machine"]["cpu_features"].append("avx1024")
    edited(copy, machine=data["machine"])
    with pytest.raises(CheckpointError, match="another CPU: this one lacks avx1024; rebuild it here"):
        LLM(copy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 9}, "max_batch_size = 9: this engine was built with 8; rebuild it with --max_batch_size 9"),
        ({"max_seq_len": 10_000}, "max_seq_len = 10000: this engine was built with"),
        ({"max_batch_size": "4"}, "max_batch_size = '4' must be an integer"),
        ({"dtype": "bfloat16"}, "dtype = 'bfloat16': this engine was built with 'float32'"),
        ({"block_size": 16}, "block_size = 16"),
        ({"backend": "eager"}, "backend = 'eager'"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "its own speculation"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_limits_are_those_it_was_built_with(
    engine: Callable[[str, str], Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(engine("eagle3", "float32"), **options)


def test_drafters_that_need_no_graph_run_next_to_any_plain_engine(
    engine: Callable[[str, str], Path], plain: Callable[[str, str], list[Outcome]], models: Path
) -> None:
    run = packed(LLM(engine("none", "float32"), speculation("ngram", models), **TIGHT))
    assert run.outcomes == plain("aoti", "float32")
    assert run.speculation.acceptance_length > 1


@pytest.mark.parametrize("mode", ["draft", "eagle3", "hidden"])
def test_speculation_that_needs_graphs_is_built_in(engine: Callable[[str, str], Path], models: Path, mode: str) -> None:
    with pytest.raises(ConfigError, match="needs graphs of its own; build an engine with it"):
        LLM(engine("none", "float32"), speculation(mode, models))


def test_limits_may_be_lowered(engine: Callable[[str, str], Path]) -> None:
    with LLM(engine("eagle3", "float32"), max_batch_size=2, max_seq_len=20, seed=5, device="cpu", **TIGHT) as llm:
        assert llm.engine.loop.scheduler.max_batch_size == 2
        assert llm.engine.max_seq_len == 20


def test_an_output_folder_that_is_taken_stays(
    engine: Callable[[str, str], Path], models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, message in ((models, "is no engine; choose another"), (engine("none", "float32"), "--replace")):
        before = sorted(folder.rglob("*"))
        assert main(["build", "--checkpoint_dir", str(models / "target"), "--output_dir", str(folder)]) == 1
        assert message in capsys.readouterr().err
        assert sorted(folder.rglob("*")) == before


def test_weights_may_lie_in_huge_pages(engine: Callable[[str, str], Path]) -> None:
    """Weights may lie in huge pages. Linux uses none for shared mappings unless asked to."""
    maps = Path("/proc/self/smaps")
    if not hasattr(mmap, "MADV_HUGEPAGE") or not maps.is_file():
        pytest.skip("no Linux")
    (tensor, *_) = load_weight_file(engine("none", "float32") / "target" / "weights.safetensors").values()
    areas = re.findall(r"^(\w+)-(\w+) (\S+) .*?^VmFlags: ([\w ]+)$", maps.read_text(), re.MULTILINE | re.DOTALL)
    (mode, flags) = next((m, f) for low, high, m, f in areas if int(low, 16) <= tensor.data_ptr() < int(high, 16))
    assert mode == "rw-p"
    assert "hg" in flags.split()


# -- measuring --------------------------------------------------------------------------------------------------------


def test_bench_compares_engines(engine: Callable[[str, str], Path], tmp_path: Path) -> None:
    model, against = engine("eagle3", "float32"), engine("none", "float32")
    folders = ["--model", str(model), "--against", str(against)]
    assert main(["bench", "decode", *folders, *SHAPE, "--repeats", "1", "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["against"] == str(against)
    assert result["lossless"] is True
    assert result["speedup"] == pytest.approx(result["tok_s"] / result["plain_tok_s"])
    assert result["acceptance_length"] > 1


def test_profiles_tell_the_phases_of_compiled_steps(
    engine: Callable[[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, against = (str(engine(mode, "float32")) for mode in ("eagle3", "none"))
    shape = (*SHAPE, "--profile", "--json", str(tmp_path / "result.json"), "--png", str(tmp_path / "result.png"))
    assert main(["bench", "decode", "--model", model, "--against", against, *shape]) == 0
    fused, plain = (
        json.loads((tmp_path / "result.json").read_text())[name]["us_per_step"] for name in (model, against)
    )
    assert all(phases[name] > 0 for phases in (fused, plain) for name in ("inputs", "verify", "deliver", "host"))
    assert fused["accept"] == fused["draft"] == plain["draft"] == 0  # in the fused engine, both are inside the graph
    assert plain["accept"] > 0
    assert main(["bench", "decode", "--model", model, *SHAPE, "--profile"]) == 0
    assert "speculative" in capsys.readouterr().out
    assert (tmp_path / "result.png").stat().st_size > 0


# -- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: replace(i, input_ids=i.input_ids.int()), "input_ids is torch.int32"),
        (lambda i: replace(i, input_ids=i.input_ids.repeat_interleave(2)[::2]), "input_ids.*strides"),
        (lambda i: replace(i, input_ids=i.input_ids + 100), r"input_ids holds 101..101; allowed are 0..15"),
        (
            lambda i: replace(i, attn=replace(i.attn, block_tables=i.attn.block_tables + 1000)),
            "block_tables holds .* allowed are 0..40",
        ),
        (lambda i: replace(i, attn=replace(i.attn, kv_lens=i.attn.kv_lens * 0)), r"kv_lens holds 0\.\."),
        (lambda i: replace(i, attn=replace(i.attn, kv_lens=i.attn.kv_lens + 9999)), "kv_lens holds .* allowed are 1"),
        (lambda i: in_spec(i, gather_ids=i.spec.gather_ids + 1), r"gather_ids holds \d\.\.(6|11);"),
        (lambda i: in_spec(i, seq_lens=i.spec.seq_lens + 1), "seq_lens is .*, the input_ids"),
        (lambda i: in_spec(i, seq_lens=i.spec.seq_lens * 0), "seq_lens is .*, the input_ids"),
        (lambda i: (i.spec.gather_ids.add_(1), i)[1], "gather_ids holds"),  # written since the last launch
        (lambda i: in_spec(i, next_draft_len=K + 1), f"graphs for K = {K}; .* wants {K + 1}"),
        (lambda i: in_spec(i, draft_lens=i.spec.draft_lens // 2), r"requests with 2 drafts have (6|8) gather_ids"),
        (lambda i: in_spec(i, draft_tokens=i.spec.draft_tokens[:, :0]), "draft_lens is .* allowed are"),
        (lambda i: in_spec(i, draft_tokens=i.spec.draft_tokens[1:]), "draft_lens is .* allowed are"),
        (lambda i: in_spec(i, draft_lens=i.spec.draft_lens + 1), "draft_lens is .* allowed are"),
        (lambda i: in_spec(i, draft_lens=i.spec.draft_lens[1:]), "draft_lens is .* allowed are"),
        (lambda i: in_spec(i, forced_accept=i.spec.forced_accept[1:]), "forced_accept has shape"),
        (lambda i: replace(i, attn=replace(i.attn, kv_lens=i.attn.kv_lens[1:])), "kv_lens has shape"),
        (lambda i: replace(i, attn=replace(i.attn, block_tables=i.attn.block_tables[1:])), "block_tables has shape"),
        (
            lambda i: in_spec(i, sampling=replace(i.spec.sampling, seeds=i.spec.sampling.seeds[:3])),
            r"seeds has shape \[3\], the graph takes \[",
        ),
    ],
    ids=[
        *("dtype", "stride", "token", "block", "no keys", "keys", "gather", "rows", "no rows", "written", "K"),
        *("draws", "no columns", "generations", "drafts", "too few drafts", "forced", "kv_lens", "tables", "seeds"),
    ],
)
@pytest.mark.parametrize("uniform", [False, True], ids=["ragged", "uniform"])
def test_inputs_a_graph_would_misread_are_refused(
    engine: Callable[[str, str], Path], change: Callable[[Any], Any], message: str, uniform: bool
) -> None:
    executable = LLM(engine("eagle3", "float32"), **TIGHT).engine.loop.target.inner
    inputs = example_batch(K, LIMITS["block_size"], uniform)
    executable.run(inputs)
    with pytest.raises(EngineError, match=message):
        executable.run(change(inputs))


def test_the_next_prompt_token_is_checked_where_it_is_read(engine: Callable[[str, str], Path]) -> None:
    executable = LLM(engine("eagle3", "float32"), **TIGHT).engine.loop.target.inner
    inputs = example_batch(K, LIMITS["block_size"])
    with pytest.raises(EngineError, match=r"next_prompt_token holds -2\..* allowed are -1\.\.15"):
        executable.run(in_spec(inputs, next_prompt_token=inputs.spec.next_prompt_token - 1))


def test_engine_folder_is_only_what_has_the_mark(models: Path, tmp_path: Path) -> None:
    assert EngineFolder.open(models / "target") is None
    assert EngineFolder.open(tmp_path / "nothing") is None
