"""Whole engines on checkpoints that are quantised already.

They compute what transformers computes from the floats that the integers stand for. Speculation changes nothing, op by
op and compiled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import edit_config, oracle, oracle_logits
from tests.e2e.tiny import add_tokenizer, assert_all_blocks_free, draw_cases, make_target, perturbed, run_alone
from tests.e2e.tiny import run_together as together
from tests.head_checkpoints import make_eagle3
from tests.models.test_logits_vs_transformers import Paged
from tests.quantized_checkpoints import Kind, quantised
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.cli import main
from trtspec.config.engine import EngineConfig
from trtspec.errors import ConfigError, WeightsError
from trtspec.models.layers import Linear, weight_bytes

LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 32, "block_size": 4}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3}
CASES = draw_cases(16, seed=5, most_prompt=40, most_tokens=16)
KINDS = [
    Kind("pack-quantized", 4, 32, False, scales=torch.bfloat16),
    Kind("int-quantized", 8, -1),
    Kind("gptq", 4, 32, ordered=True),
    Kind("awq", 4, 64, False),
    Kind("pack-quantized", 8, 32),
]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("models"), **SIZES)
    add_tokenizer(folder)
    perturbed(folder, noise=0.15)  # next to it, as draft/
    return folder


def decoder_of(llm: LLM) -> Any:
    return llm.engine.loop.target.inner.step.decoder


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_logits_are_those_of_the_floats(floats: Path, tmp_path: Path, kind: Kind) -> None:
    """Logits are those of transformers on the dequantised fp32 weights.

    There, the inputs of each linear are rounded to int8 as ours are, so only ties that round the other way differ.
    Without that rounding, logits differ by 2 to 5 % in a model with such wide weights.
    """
    folder, plain = quantised(floats, tmp_path, kind)
    tokens = torch.randint(16, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    theirs = oracle(plain)
    logits = Paged(decoder_of(LLM(folder, dtype="float32", num_kv_blocks=16, **LIMITS)), 1).step({0: tokens})[0]
    exact = oracle_logits(theirs, tokens)
    assert (logits - exact).norm() <= 0.06 * exact.norm()
    if not kind.ordered:  # an ordered kind has groups of other inputs
        round_inputs(theirs, kind)
        assert (logits - oracle_logits(theirs, tokens)).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("kind", [Kind("pack-quantized", 4, 64), Kind("int-quantized", 8, -1), KINDS[4]], ids=str)
def test_logits_are_those_of_transformers_on_the_same_folder(floats: Path, tmp_path: Path, kind: Kind) -> None:
    """transformers reads compressed-tensors folders itself, and its logits differ by rounding alone.

    It rounds inputs where the config says so, to -128..127 of 255 steps.
    """
    folder, plain = quantised(floats, tmp_path, kind)
    tokens = torch.randint(16, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    theirs = oracle_logits(oracle(folder), tokens)
    logits = Paged(decoder_of(LLM(folder, dtype="float32", num_kv_blocks=16, **LIMITS)), 1).step({0: tokens})[0]
    assert (logits - theirs).norm() <= 0.06 * theirs.norm()
    if kind.layout == "pack-quantized":
        torch.testing.assert_close(theirs, oracle_logits(oracle(plain), tokens), rtol=1e-5, atol=1e-5)


def round_inputs(model: torch.nn.Module, kind: Kind) -> None:
    """Round the inputs of each linear to integers of at most 127 times a scale.

    There is a scale for each row or, where weights are in groups, for each row and group.
    """

    def rounded(linear: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        groups = inputs[0].unflatten(-1, (-1, inputs[0].shape[-1] if kind.group_size == -1 else kind.group_size))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return ((groups / scale).round() * scale).flatten(-2)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_changes_nothing(floats: Path, tmp_path: Path, kind: Kind, dtype: str) -> None:
    """Packed requests with drafts in a tight cache, greedy and sampled, equal plain decoding one at a time."""
    folder, _ = quantised(floats, tmp_path, kind)
    alone = run_alone(LLM(folder, dtype=dtype, num_kv_blocks=64, **LIMITS).engine, CASES)
    llm = LLM(folder, NGRAM, dtype=dtype, num_kv_blocks=21, **LIMITS)
    run = together(llm.engine, CASES)
    assert run.outcomes == alone
    assert 0 < run.speculation.acceptance_per_position[0] < 1
    assert_all_blocks_free(llm)


def test_a_quantised_draft(floats: Path, tmp_path: Path) -> None:
    """Target and draft may have different layouts."""
    folder, _ = quantised(floats, tmp_path / "target", KINDS[2])
    draft, _ = quantised(floats.parent / "draft", tmp_path / "draft", KINDS[3])
    wishes = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    alone = run_alone(LLM(folder, num_kv_blocks=64, **LIMITS).engine, CASES)
    run = together(LLM(folder, wishes, num_kv_blocks=64, **LIMITS).engine, CASES)
    assert run.outcomes == alone
    assert 0 < run.speculation.acceptance_per_position[0] < 1
    with pytest.raises(ConfigError, match="quantization = 'int8': the draft's checkpoint is quantised already"):
        LLM(folder, {**wishes, "quantization": "int8"}, **LIMITS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Kind("gptq", 4, 32, False, ordered=True), "gptq, int4 in groups of 32"),
        (Kind("pack-quantized", 8, 32), "compressed-tensors, int8 in groups of 32"),
    ],
    ids=str,
)
def test_a_compiled_engine(floats: Path, tmp_path: Path, kind: Kind, said: str) -> None:
    """The folder holds the order of inputs and the zero points, describes its contents, and needs no checkpoint."""
    folder, _ = quantised(floats, tmp_path, kind)
    eager = LLM(folder, NGRAM, num_kv_blocks=64, **LIMITS)
    output = tmp_path / "engine"
    build_engine(folder, output, None, EngineConfig(**LIMITS))
    data = json.loads((output / "config.json").read_text())
    assert data["checkpoint_quantization"] == {"target": said}
    assert data["pretrained_config"]["quantization_config"]["quant_method"] == said.partition(",")[0]
    assert data["executables"]["target"]["weight_bytes"] == decoder_of(eager).weight_bytes_per_step
    folder.rename(tmp_path / "gone")
    alone = run_alone(LLM(output, num_kv_blocks=64).engine, CASES)
    assert together(LLM(output, NGRAM, num_kv_blocks=21).engine, CASES).outcomes == alone
    assert together(eager.engine, CASES).outcomes == alone
    with pytest.raises(ConfigError, match="quantization = 'int8': this engine was built with None"):
        LLM(output, quantization="int8")


@pytest.mark.parametrize("kind", KINDS[3:], ids=str)
def test_dry_runs_count_and_refuse(
    floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Kind
) -> None:
    folder, _ = quantised(floats, tmp_path, kind)
    arguments = ["build", "--checkpoint_dir", str(folder), "--output_dir", str(tmp_path / "out"), "--dry_run"]
    assert main(arguments) == 0
    decoder = decoder_of(LLM(folder, **LIMITS))
    read = weight_bytes(decoder) - decoder.embedding.weight.nbytes
    assert f"a step of target reads {read / 1e6:.1f} MB of weights" in capsys.readouterr().out
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 3, "group_size": 128})
    assert main(arguments) == 1
    assert "only 4 and 8 bits are supported" in " ".join(capsys.readouterr().err.split())


def test_quantization_is_for_what_the_checkpoint_left(floats: Path, tmp_path: Path) -> None:
    folder, _ = quantised(
        floats, tmp_path, Kind("awq", 4, 32, False), ("lm_head", "down_proj"), modules_to_not_convert=["down_proj"]
    )
    layer = decoder_of(LLM(folder, **LIMITS)).layers[0]
    assert layer.mlp.down.weight.dtype == torch.float32
    before = layer.mlp.gate_up.weight
    layer = decoder_of(LLM(folder, quantization="int4", **LIMITS)).layers[0]
    assert layer.mlp.down.weight.dtype == torch.uint8
    assert torch.equal(layer.mlp.gate_up.weight, before)
    with pytest.raises(
        ConfigError, match=r"quantization = 'int8': the target's .* or 'int4' for the linears that it left"
    ):
        LLM(folder, quantization="int8", **LIMITS)


def test_an_unquantised_head_serves_a_quantised_target(floats: Path, tmp_path: Path) -> None:
    """An unquantised head serves a quantised target. A head whose config.json claims to be quantised is refused."""
    folder, _ = quantised(floats, tmp_path, KINDS[2])
    head = make_eagle3(tmp_path, floats, capture=(0, 1))
    wishes = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    alone = run_alone(LLM(folder, num_kv_blocks=64, **LIMITS).engine, CASES)
    llm = LLM(folder, wishes, num_kv_blocks=64, **LIMITS)
    assert together(llm.engine, CASES).outcomes == alone
    assert all(linear.is_packed for linear in decoder_of(llm).layers.modules() if isinstance(linear, Linear))
    edit_config(head, quantization_config=KINDS[2].config())
    with pytest.raises(WeightsError, match=r"missing: fc\.g_idx .* unexpected: fc\.weight, .* belong together"):
        LLM(folder, wishes, **LIMITS)
