"""Engines whose decoder is cut into blocks: equal layers share one graph, and ids and logprobs do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.tiny import add_tokenizer, draw_cases, make_target, perturbed, run_alone, run_together
from tests.head_checkpoints import make_eagle3
from trtspec import LLM, SamplingParams
from trtspec.backends.aoti import cut, executable
from trtspec.backends.aoti.cut import LEAST_LAYERS, blocks_of, gives_all_streams, read_layers
from trtspec.backends.compiled import CompiledStep
from trtspec.build.build import build_engine
from trtspec.config.checkpoint.model import RopeConfig
from trtspec.config.engine import EngineConfig
from trtspec.errors import CheckpointError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.step import CaptureStep, DecodeStep
from trtspec.models.decoder import Decoder
from trtspec.models.layers import Linear
from trtspec.models.specs import DecoderSpec
from trtspec.ops import open_row, runs_graphs

CASES = draw_cases(16, seed=5)
LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 64, "block_size": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "one shape": {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0)]"},
    "each step its own": {"num_speculative_tokens": 2, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 5},
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 8}


# -- how a decoder is cut ---------------------------------------------------------------------------------------------


def decoder_of(windows: list[int | None]) -> Decoder:
    rope = RopeConfig(rope_type="default", theta=10000.0)
    sizes = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 16}
    return Decoder(
        DecoderSpec(
            vocab_size=32, num_layers=len(windows), rms_norm_eps=1e-5, rope=rope, max_position_embeddings=8,
            windows=tuple(windows), **sizes,
        )
    )  # fmt: skip


@given(st.lists(st.sampled_from([None, 9]), min_size=1, max_size=24), st.sets(st.integers(0, 23), max_size=2))
@settings(max_examples=40, deadline=None)
def test_layers_of_one_graph_are_alike(windows: list[int | None], quantised: set[int]) -> None:
    decoder = decoder_of(windows)
    quantised &= set(range(len(windows)))
    for layer in quantised:
        linear = decoder.layers[layer].mlp.down
        assert isinstance(linear, Linear)
        linear.pack("int8")
    blocks = blocks_of(DecodeStep(decoder))
    if len(windows) < LEAST_LAYERS:
        assert blocks == ()
        return
    assert [layer for block in blocks for layer in range(block.first, block.first + block.count)] == [
        *range(len(windows))
    ]
    kinds = [
        tuple((windows[layer], layer in quantised) for layer in range(block.first, block.first + block.count))
        for block in blocks
    ]
    files = [block.file for block in blocks]
    assert len(set(zip(kinds, files, strict=True))) == len(set(kinds)) == len(set(files))


def test_many_equal_layers_are_one_graph_or_two() -> None:
    for layers in (LEAST_LAYERS, 13, 22, 30, 32, 61):
        step = DecodeStep(decoder_of([None] * layers))
        assert len({block.file for block in blocks_of(step)}) == 1 + any(
            block.count != blocks_of(step)[0].count for block in blocks_of(step)
        )


@pytest.mark.parametrize(
    ("captured", "read", "everywhere"),
    [((-1,), (23,), False), ((23,), (23,), False), ((1, -1), (1, 23), True), ((5, 11), (5, 11, 23), False)],
)
def test_streams_that_are_read(captured: tuple[int, ...], read: tuple[int, ...], everywhere: bool) -> None:
    step = CaptureStep(decoder_of([None] * 24), captured)
    blocks = blocks_of(step)
    assert {block.first + block.count - 1 for block in blocks} == {*range(2, 24, 3)}
    assert read_layers(step) == read
    assert gives_all_streams(step, blocks) == everywhere


# -- engines ----------------------------------------------------------------------------------------------------------


def build(folder: Path, target: Path, asked: dict[str, Any] | None, options: dict[str, Any], blocks: int) -> Path:
    """Build an engine and check that it has `blocks` blocks. Returns its folder."""
    config = EngineConfig(backend="aoti", **LIMITS, **options)
    engine = build_engine(target, folder, read_speculative_config(asked), config)
    assert len(CompiledStep.from_dict(engine.data["executables"]["target"]).blocks) == blocks
    return engine.path


def run(model: Path, asked: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """Return logprobs, and outcomes and acceptance of the cases in batches.

    One by one, the first cases have the same.
    """
    with LLM(model, asked, num_kv_blocks=128, **options) as llm:
        asking = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
        logprobs = [one.outputs[0].logprobs for one in llm.generate([[3, 1, 4, 1, 5], [9, 2]], asking)]
        together = run_together(llm.engine, CASES)
        assert run_alone(llm.engine, CASES[:4]) == together.outcomes[:4]
    assert logprobs[0]
    return logprobs, together.outcomes, together.speculation.outcomes


def same_bits(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: Path,
    asked: dict[str, Any] | None,
    options: dict[str, Any],
    blocks: int,
) -> None:
    """Check that a cut engine returns the ids, logprobs and accepted drafts of an engine of whole graphs."""
    add_tokenizer(target)
    monkeypatch.setattr(cut, "LEAST_LAYERS", 8)
    cut_up = run(build(folder / "cut", target, asked, options, blocks))
    monkeypatch.setattr(cut, "LEAST_LAYERS", 1000)
    assert cut_up == run(build(folder / "whole", target, asked, options, 0))


@pytest.mark.long
def test_eagle3_reads_states_from_inside_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE3 reads hidden states from inside blocks.

    The embedding that head and target share is held once. The error for a damaged block names its file.
    """
    monkeypatch.setattr(cut, "LEAST_LAYERS", 8)
    target = make_target(tmp_path, num_hidden_layers=9)
    head = make_eagle3(tmp_path, target, (1, 4, 7))
    asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    add_tokenizer(target)
    rows: list[int] = []
    monkeypatch.setattr(executable, "open_row", lambda uses: rows.append(len(uses)) or open_row(uses))
    folder = build(tmp_path / "engine", target, asked, {}, 3)
    engine = run(folder)
    assert rows == [3] * runs_graphs()
    assert engine[1:] == run(target, asked, backend="eager", **LIMITS)[1:]

    held = executable.load_constants(folder / "target")
    assert held["step.worker.head.embedding.weight"] is held["step.decoder.embedding.weight"]

    block = next(folder.glob("target/layers*.pt2"))
    block.write_bytes(bytes(block.stat().st_size))
    with pytest.raises(CheckpointError, match=rf"{block.name} is damaged .*; copy it again or rebuild the engine"):
        LLM(folder)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}])
def test_plain_and_ngram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    target = make_target(tmp_path, num_hidden_layers=10, tie_word_embeddings=True)
    same_bits(tmp_path, monkeypatch, target, {"method": "ngram", "num_speculative_tokens": 3}, options, 5)


@pytest.mark.long
def test_eagle3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(tmp_path, num_hidden_layers=9)
    head = make_eagle3(tmp_path, target, (1, 4, 7))
    asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    same_bits(tmp_path, monkeypatch, target, asked, {"dtype": "bfloat16"}, 3)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Layers get the places of nodes as inputs, and the epilogue moves the KV of all layers."""
    target = make_target(tmp_path, num_hidden_layers=9)
    head = make_eagle3(tmp_path, target, (1, 4, 7))
    asked = {"method": "eagle3", "model": str(head), **SHAPES[shape]}
    same_bits(tmp_path, monkeypatch, target, asked, {}, 3)


@pytest.mark.long
def test_layers_with_and_without_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(tmp_path, "qwen2", num_hidden_layers=16, **WINDOWED)
    same_bits(tmp_path, monkeypatch, target, None, {}, 8)


@pytest.mark.long
def test_a_draft_model_that_is_cut_next_to_a_target_that_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(tmp_path, num_hidden_layers=8)
    draft = perturbed(target, noise=0.1)
    same_bits(
        tmp_path,
        monkeypatch,
        target,
        {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2},
        {},
        4,
    )


@pytest.mark.long
def test_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels, graphs call the ops by torch's dispatcher, and the package of a graph must declare this."""
    monkeypatch.setattr("trtspec.backends.aoti.compile.graph_calls", dict)
    same_bits(tmp_path, monkeypatch, make_target(tmp_path, num_hidden_layers=8), None, {}, 4)


def test_a_constant_that_graphs_disagree_on_is_an_error(tmp_path: Path) -> None:
    from trtspec.backends.aoti.compile import Constants
    from trtspec.errors import EngineError

    constants = Constants()
    constants.hold("a", torch.ones(2))
    constants.hold("a", torch.ones(2))
    with pytest.raises(EngineError, match="graphs differ in their constant a"):
        constants.hold("a", torch.zeros(2))
