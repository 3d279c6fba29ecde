"""Engines of ONNX graphs on ONNX Runtime: the conformance suite in fp32, quantised weights, and the engine folder."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import make_checkpoint
from tests.e2e.conformance import (
    CASES,
    LIMITS,
    MODES,
    TIGHT,
    assert_speculation_changes_nothing,
    assert_words_are_those_of_eager,
    build,
    make_models,
    packed,
    speculation,
)
from tests.e2e.tiny import Outcome, Run, run_alone
from tests.quantized_checkpoints import Kind, quantised
from trtspec import LLM, SamplingParams
from trtspec.backends.onnx.executable import OnnxExecutable
from trtspec.backends.onnx.export import DOMAIN, OPSET
from trtspec.backends.onnx.functions import with_bodies
from trtspec.build.build import build_engine
from trtspec.cli import main
from trtspec.config.engine import EngineConfig
from trtspec.errors import CheckpointError, DependencyError, UnsupportedError
from trtspec.interop.reading import read_speculative_config

BUILT = [mode if mode == "none" else pytest.param(mode, marks=pytest.mark.long) for mode in MODES]
SHORT = "eagle3 with two drafts"  # the graphs of K drafts take longer to build, and are the same otherwise


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), num_layers=2)


def two_drafts(models: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(models / "head"), "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One of MODES or SHORT -> an engine folder, built when first asked for."""

    @functools.cache
    def make(mode: str) -> Path:
        folder = tmp_path_factory.mktemp("engines") / "engine"
        if mode != SHORT:
            return build(models, folder, "onnx", mode, "float32")
        config = EngineConfig(backend="onnx", dtype="float32", **LIMITS)
        build_engine(models / "target", folder, read_speculative_config(two_drafts(models)), config)
        return folder

    return make


@dataclass(frozen=True)
class Ran:
    """The engine of SHORT after it ran all cases, packed. used: whether its graphs that ran are uniform."""

    llm: LLM
    run: Run
    used: set[bool]


@pytest.fixture(scope="module")
def ran(engine: Callable[[str], Path]) -> Ran:
    llm, used = LLM(engine(SHORT), **TIGHT), set[bool]()
    graphs = llm.engine.loop.target.inner._graphs
    runs = [graph.run for graph in graphs]
    for graph in graphs:
        graph.run = lambda tensors, graph=graph, run=graph.run: used.add(graph.uniform) or run(tensors)
    found = Ran(llm, packed(llm), used)
    for graph, run in zip(graphs, runs, strict=True):
        graph.run = run
    return found


@pytest.fixture(scope="module")
def plain(engine: Callable[[str], Path], models: Path) -> Callable[[str], list[Outcome]]:
    """backend -> the outcomes of plain decoding for CASES, one case at a time."""

    @functools.cache
    def outcomes(backend: str) -> list[Outcome]:
        if backend == "onnx":
            return run_alone(LLM(engine("none"), num_kv_blocks=128).engine, CASES)
        return run_alone(LLM(models / "target", num_kv_blocks=128, **LIMITS).engine, CASES)

    return outcomes


@pytest.mark.parametrize("mode", BUILT)
def test_speculation_changes_nothing(
    engine: Callable[[str], Path], plain: Callable[[str], list[Outcome]], mode: str
) -> None:
    llm = LLM(engine(mode), **TIGHT)
    assert isinstance(llm.engine.loop.target.inner, OnnxExecutable)
    assert_speculation_changes_nothing(llm, plain("onnx"), mode)


@pytest.mark.parametrize("mode", BUILT)
def test_the_words_are_those_of_eager(
    engine: Callable[[str], Path], plain: Callable[[str], list[Outcome]], models: Path, mode: str
) -> None:
    assert_words_are_those_of_eager(engine(mode), models, mode, plain("eager"))


def test_two_drafts(ran: Ran, plain: Callable[[str], list[Outcome]], models: Path) -> None:
    """Ids are those of plain decoding, here and in eager. Drafts are eager's, right now and then at both positions."""
    assert isinstance(ran.llm.engine.loop.target.inner, OnnxExecutable)
    eager = packed(LLM(models / "target", two_drafts(models), **LIMITS, **TIGHT))
    assert ran.run.outcomes == eager.outcomes == plain("onnx") == plain("eager")
    assert ran.run.speculation == eager.speculation
    assert len(eager.speculation.acceptance_per_position) == 2
    assert all(0 < share < 1 for share in eager.speculation.acceptance_per_position)


@pytest.mark.long
def test_a_draft_model_inside_the_graph(
    engine: Callable[[str], Path], plain: Callable[[str], list[Outcome]], models: Path
) -> None:
    assert_words_are_those_of_eager(engine("draft_inside"), models, "draft_inside", plain("eager"))


@pytest.mark.long
def test_a_schedule_of_draft_lengths(models: Path, tmp_path: Path, plain: Callable[[str], list[Outcome]]) -> None:
    """A schedule has graphs for K, 1 and 0. Their constants share one file and some names."""
    folder = build(models, tmp_path / "engine", "onnx", "eagle3", "float32", schedule=True)
    assert_words_are_those_of_eager(folder, models, "eagle3", plain("eager"), schedule=True)


def test_uniform_and_ragged_graphs_both_ran(ran: Ran) -> None:
    assert ran.used == {False, True}


@pytest.mark.long
def test_hidden_states_are_those_of_eager(engine: Callable[[str], Path], models: Path) -> None:
    """SAVE_HIDDEN_STATES saves the states of eager."""
    saved = {}
    for backend in ("onnx", "eager"):
        shutil.rmtree(models / "saved", ignore_errors=True)
        if backend == "onnx":
            llm = LLM(engine("hidden"), **TIGHT)
        else:
            llm = LLM(models / "target", speculation("hidden", models), **LIMITS, **TIGHT)
        with llm:
            llm.generate([[1, 2, 3, 4], [5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
        saved[backend] = {file.name: load_file(file) for file in sorted((models / "saved").glob("*.safetensors"))}
    assert saved["onnx"].keys() == saved["eager"].keys() != set()
    for name, tensors in saved["onnx"].items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, saved["eager"][name][key], rtol=1e-5, atol=1e-5)


def test_no_cache_is_copied(engine: Callable[[str], Path], ran: Ran) -> None:
    """No cache is copied: each state of a cache is in the cache's own memory.

    A draft layer that runs twice writes its cache twice.
    """
    executable = ran.llm.engine.loop.target.inner
    ours = {tensor.data_ptr() for tensor in executable._flat_kv}
    for graph in executable._graphs:
        bound = graph.run.__self__
        file = engine(SHORT) / "target" / f"{'uniform' if graph.uniform else 'ragged'}_k{graph.draft_len}.onnx"
        nodes = onnx.load(file, load_external_data=False).graph.node
        passes = sum(node.op_type == "SpecAttention" for node in nodes)
        assert passes == 2 + 2  # the target's layers, and one draft layer, twice
        addresses = [value.data_ptr() for value in bound.binding.get_outputs()]
        assert sum(address in ours for address in addresses) == 2 * passes


def test_threads_do_not_spin_between_steps(engine: Callable[[str], Path]) -> None:
    """Each graph has its own threads, which do not spin.

    On two cores, two threads that spin made a step take twice as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        llm = LLM(engine("none"), **TIGHT)
    finally:
        torch.set_num_threads(before)
    for graph in llm.engine.loop.target.inner._graphs:
        options = graph.run.__self__.session.get_session_options()
        assert options.intra_op_num_threads == 2
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8), use_tqdm=False)[0].finished


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_lose_nothing_to_speculation(models: Path, tmp_path: Path, kind: str) -> None:
    config = EngineConfig(backend="onnx", quantization=kind, **LIMITS)
    build_engine(models / "target", tmp_path / "none", None, config)
    alone = run_alone(LLM(tmp_path / "none", num_kv_blocks=128).engine, CASES)
    assert packed(LLM(tmp_path / "none", speculation("ngram", models), **TIGHT)).outcomes == alone
    model = onnx.load(tmp_path / "none" / "target" / "ragged_k0.onnx", load_external_data=False)
    assert {a.i for n in model.graph.node if n.op_type == "MatMulNBits" for a in n.attribute if a.name == "bits"} == {
        {"int8": 8, "int4": 4}[kind]
    }


@pytest.mark.long
@pytest.mark.parametrize("kind", [Kind("pack-quantized", 8, 32), Kind("gptq", 8, 64)], ids=str)
def test_8_bit_weights_in_groups(tmp_path: Path, kind: Kind) -> None:
    """Logprobs of a checkpoint with 8-bit weights in groups are eager's, except in rows with a tie.

    A number of x may be a tie that rounds the other way. If blocks were not the groups, all rows would be off, by 0.03
    on average.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    folder, _ = quantised(make_checkpoint(tmp_path, "qwen3", initializer_range=0.1, **sizes), tmp_path, kind)
    build_engine(folder, tmp_path / "engine", None, EngineConfig(backend="onnx", dtype="float32", **LIMITS))
    prompts = torch.randint(3, 199, (6, 9), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for llm in (LLM(folder, dtype="float32", **LIMITS), LLM(tmp_path / "engine")):
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, logprobs=4), False)
        found.append([sorted(one.logprob for one in (o.outputs[0].logprobs or [])[0].values()) for o in outputs])
        llm.shutdown()
    ours, theirs = map(torch.tensor, found)
    assert (ours - theirs).abs().median() < 1e-4
    assert (ours - theirs).abs().max() < 0.1
    assert ours.std() > 0.1


@pytest.mark.parametrize("mode", [*BUILT, SHORT])
def test_onnx_finds_nothing_wrong_with_the_graphs(engine: Callable[[str], Path], mode: str) -> None:
    """Graphs pass ONNX's checks with and without bodies of our ops. All graphs refer to the same file of weights."""
    for facts in json.loads((engine(mode) / "config.json").read_text())["executables"].values():
        assert all(graph["file"].endswith(".onnx") for graph in facts["graphs"])
    for file in engine(mode).rglob("*.onnx"):
        model = onnx.load(file, load_external_data=False)
        assert {entry.domain: entry.version for entry in model.opset_import} == {"": OPSET, DOMAIN: 1}
        onnx.checker.check_model(str(file), full_check=True)
        onnx.checker.check_model(with_bodies(onnx.load(file)))
        places = {
            entry.value
            for tensor in model.graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
        assert places == {"weights.safetensors"}
        assert file.stat().st_size < 1_000_000
        assert {node.op_type for node in model.graph.node if node.domain == DOMAIN} == {
            "SpecAttention",
            "ProcessLogits",
            "SpecSample",
            *(["SpecAccept"] if mode in ("eagle3", SHORT) else []),
        }


def test_half_precision_is_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["build", "--checkpoint_dir", str(models / "target"), "--output_dir", str(tmp_path / "out")]
    assert main([*command, "--backend", "onnx", "--dtype", "bfloat16"]) == 1
    assert "ONNX Runtime computes in float32 on a CPU; ask for dtype float32" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match="dtype = 'float16'"):
        build_engine(models / "target", tmp_path / "out", None, EngineConfig(backend="onnx", dtype="float16"))
    assert not (tmp_path / "out").exists()


def test_a_damaged_graph_is_named(engine: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(engine("none"), tmp_path / "engine")
    file = folder / "target" / "ragged_k0.onnx"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(CheckpointError, match=r"ragged_k0\.onnx cannot be loaded.*rebuild"):
        LLM(folder)


def test_files_may_be_links(engine: Callable[[str], Path], tmp_path: Path) -> None:
    """Files may be links, as in a download cache: names link to files of other names in another folder."""
    folder = shutil.copytree(engine("none"), tmp_path / "snapshot")
    (tmp_path / "blobs").mkdir()
    for i, file in enumerate(sorted(file for file in folder.rglob("*") if file.is_file())):
        file.rename(tmp_path / "blobs" / str(i))
        file.symlink_to(tmp_path / "blobs" / str(i))
    params = SamplingParams(temperature=0, max_tokens=8)
    ours, copied = (LLM(path, **TIGHT).generate("ab", params)[0].outputs[0] for path in (engine("none"), folder))
    assert ours.token_ids == copied.token_ids


def test_a_graph_of_other_layers_is_refused(engine: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(engine("none"), tmp_path / "engine")
    facts = json.loads((folder / "config.json").read_text())
    facts["executables"]["target"]["kv"].pop()
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=r"ragged_k0\.onnx has 4 caches, config.json says 2; rebuild"):
        LLM(folder)


def test_an_onnxruntime_that_is_missing_or_too_old(
    engine: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.9.1")
    with pytest.raises(DependencyError, match=r"needs onnxruntime 1\.22 or newer, this is 1\.9\.1"):
        LLM(engine("none"))
    monkeypatch.delitem(sys.modules, "trtspec.backends.onnx.executable")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for command in (["verify", str(engine("none"))], ["generate", "--model", str(engine("none")), "--prompt", "a"]):
        assert main(command) == 1
        assert "needs the package onnxruntime: pip install 'trtspec[onnx]'" in capsys.readouterr().err


def test_the_widest_step_is_what_it_was_built_for(ran: Ran) -> None:
    assert ran.llm.engine.loop.target.inner.compiled.draft_lens == (2,)
