"""An lm_head in int8, and the embedding that is tied to it: smaller, and speculation returns plain decoding's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import add_tokenizer, draw_cases, make_target, perturbed, run_alone, run_together
from tests.head_checkpoints import make_eagle3
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.build.plan import plan_build
from trtspec.cli import main
from trtspec.config.engine import EngineConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.interop.reading import read_speculative_config

CASES = draw_cases(16, seed=11)
LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 64, "block_size": 4}
OPTIONS: dict[str, Any] = {**LIMITS, "dtype": "bfloat16", "quantization": "int8", "lm_head_quantization": "int8"}


def drafts(folder: Path, target: Path) -> dict[str, dict[str, Any]]:
    perturbed(target, noise=0.15)
    return {
        "draft": {"method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": 3},
        "eagle3": {
            "method": "eagle3",
            "model": str(make_eagle3(folder, target, (0, 1, 2))),
            "num_speculative_tokens": 3,
        },
    }


@pytest.mark.parametrize("tied", [False, True])
def test_text_is_plain_decodings(tmp_path: Path, tied: bool) -> None:
    target = make_target(tmp_path, num_hidden_layers=3, tie_word_embeddings=tied)
    add_tokenizer(target)
    with LLM(target, num_kv_blocks=128, **OPTIONS) as llm:
        plain = run_alone(llm.engine, CASES)
    for name, speculation in drafts(tmp_path, target).items():
        with LLM(target, speculation, num_kv_blocks=128, **OPTIONS) as llm:
            run = run_together(llm.engine, CASES)
        assert run.outcomes == plain, name
        assert run.speculation.num_drafts > 0


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_text_of_compiled_engines_is_plain_decodings(tmp_path: Path, tied: bool) -> None:
    target = make_target(tmp_path, num_hidden_layers=3, tie_word_embeddings=tied)
    add_tokenizer(target)
    config = EngineConfig(backend="aoti", **OPTIONS)
    build_engine(target, tmp_path / "plain", None, config)
    with LLM(tmp_path / "plain", num_kv_blocks=128) as llm:
        plain = run_alone(llm.engine, CASES)
    for name, speculation in drafts(tmp_path, target).items():
        build_engine(target, tmp_path / f"engine-{name}", read_speculative_config(speculation), config)
        with LLM(tmp_path / f"engine-{name}", num_kv_blocks=128) as llm:
            run = run_together(llm.engine, CASES)
        assert run.outcomes == plain, name
        assert run.speculation.num_drafts > 0


@pytest.mark.parametrize("tied", [False, True])
def test_what_it_saves(tmp_path: Path, tied: bool) -> None:
    """An int8 lm_head takes a byte per element and a scale per id. The embedding costs nothing more, tied or not."""
    target = make_target(tmp_path, vocab_size=2048, hidden_size=64, tie_word_embeddings=tied)
    weights = []
    for head in (None, "int8"):
        config = EngineConfig(backend="aoti", **{**OPTIONS, "lm_head_quantization": head})
        weights.append(plan_build(target, None, config).executables["target"].weights["target"])
    assert weights[0] - weights[1] == 2048 * 64 * (2 - 1) - 2048 * 4


def test_who_does_not_take_it(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    with pytest.raises(ConfigError, match=r"lm_head_quantization = 'int4'; use 'int8' or None"):
        EngineConfig(lm_head_quantization="int4")
    with pytest.raises(UnsupportedError, match="lm_head_quantization = 'int8': backend onnx keeps the lm_head"):
        plan_build(target, None, EngineConfig(backend="onnx", lm_head_quantization="int8", dtype="float32"))


def test_the_command_line_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = make_target(tmp_path, vocab_size=2048, hidden_size=64)
    sizes = []
    for more in ([], ["--lm_head_quantization", "int8"]):
        assert (
            main(["build", "--checkpoint_dir", str(target), "--output_dir", str(tmp_path / "e"), "--dry_run", *more])
            == 0
        )
        sizes.append(capsys.readouterr().out)
    assert sizes[0] != sizes[1]
