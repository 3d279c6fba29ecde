"""Builds of compiled engines: what they make, what they show beforehand, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch._inductor import config as inductor

from tests.checkpoints import edit_config
from tests.e2e.conformance import CASES, LIMITS, TIGHT, make_models, packed, speculation
from tests.e2e.tiny import make_target, run_alone
from tests.head_checkpoints import make_eagle
from trtspec import LLM
from trtspec.backends import weight_file
from trtspec.backends.table import BACKENDS
from trtspec.backends.weight_file import load_weight_file
from trtspec.build.build import build_engine
from trtspec.build.context import plan_context
from trtspec.cli import main
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.interop.reading import read_speculative_config
from trtspec.modes import SpeculativeDecodingMode as M


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "modes"), [("int8", ["eagle3"]), ("int4", ["draft", "eagle3"])])
def test_quantised_weights_lose_nothing_to_speculation(
    models: Path, tmp_path: Path, kind: str, modes: list[str]
) -> None:
    """With quantised target and draft, speculation returns the ids of plain decoding alone, both compiled and eager.

    Requests are packed in a tight cache, with drafts.
    """
    config = EngineConfig(dtype="float32", quantization=kind, **LIMITS)
    build_engine(models / "target", tmp_path / "none", None, config)
    alone = run_alone(LLM(tmp_path / "none", num_kv_blocks=128).engine, CASES)
    assert packed(LLM(tmp_path / "none", speculation("ngram", models), **TIGHT)).outcomes == alone
    for mode in modes:
        wishes = {**(speculation(mode, models) or {}), "quantization": kind, "draft_len_schedule": None}
        build_engine(models / "target", tmp_path / mode, read_speculative_config(wishes), config)
        compiled = LLM(tmp_path / mode, **TIGHT)
        for llm in (compiled, LLM(models / "target", wishes, quantization=kind, **LIMITS, **TIGHT)):
            run = packed(llm)
            assert run.outcomes == alone
            assert 0 < run.speculation.acceptance_per_position[0] < 1


def test_a_checkpoint_is_not_an_engine(models: Path) -> None:
    with pytest.raises(ConfigError, match="trtspec build --checkpoint_dir"):
        LLM(models / "target", backend="aoti")


def test_without_a_compiler_nothing_is_begun(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--checkpoint_dir", str(models / "target"), "--output_dir", str(tmp_path / "out")]
    with inductor.patch({"cpp.cxx": (str(tmp_path / "no-compiler"),)}):
        assert main(["build", *arguments]) == 1
    assert "needs a C++ compiler; install g++" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_drafter_object_cannot_be_written_into_an_engine(models: Path, tmp_path: Path) -> None:
    drafter = read_speculative_config({"method": "custom_class", "drafter": object(), "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match="cannot hold a drafter object; build it without speculation"):
        build_engine(models / "target", tmp_path / "out", drafter, EngineConfig())


def test_dry_run_shows_graphs_and_memory(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--checkpoint_dir", str(models / "target"), "--output_dir", str(tmp_path / "out"), "--dry_run"]
    arguments += ["--speculative_decoding_mode", "EAGLE3_ONE_MODEL", "--speculative_model_dir", str(models / "head")]
    assert main(["build", *arguments, "--max_draft_len", "2", "--max_batch_size", "4"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "ragged graphs for K = 2",
        "int64    [G, K]",
        "uniform graphs for K = 2",
        "weights of target",
        "bytes a token",
    ):
        assert words in shown
    assert not (tmp_path / "out").exists()


def test_weights_are_read_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read in several pieces at a time, without changes. A file that ends too early is refused."""
    file = tmp_path / "weights.safetensors"
    monkeypatch.setattr(weight_file, "_READ_AT_ONCE", 1000)
    tensors = {"a": torch.randn(70, 30), "b": torch.arange(7, dtype=torch.int8), "c": torch.randn(999).bfloat16()}
    save_file(tensors, file)
    loaded = load_weight_file(file)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="rebuild"):
        load_weight_file(file)


@pytest.mark.long
def test_a_head_that_its_folders_name_gives_away_is_one_in_the_engine_too(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    head = make_eagle(tmp_path, target).rename(tmp_path / "eagle-head")
    edit_config(head, architectures=["LlamaForCausalLM"], model_type="llama")
    asked = SpeculativeConfig(model=str(head), num_speculative_tokens=1)
    config = EngineConfig(max_batch_size=1, max_num_tokens=8, max_seq_len=16, backend="onnx", dtype="float32")
    planned = plan_context(target, asked, config, BACKENDS["onnx"])
    assert planned.mode is M.EAGLE_ONE_MODEL
    engine = build_engine(target, tmp_path / "engine", asked, config)
    assert plan_context(engine, None, config, BACKENDS["onnx"]).mode is planned.mode
