"""Integer weights that are refused by name: configs, values, dtypes and shapes that cannot be held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import edit_config, make_checkpoint
from tests.models import quantized_linears
from tests.models.quantized_linears import Fused, bf16, weights
from tests.quantized_checkpoints import Kind, quantised
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.config.checkpoint.reader import Reader
from trtspec.errors import CheckpointError, ConfigError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.models.weights import load_decoder

floats = quantized_linears.floats


CT, GPTQ, AWQ = Kind("pack-quantized"), Kind("gptq"), Kind("awq", symmetric=False)


def group(kind: Kind = CT, weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return config_groups with changes to its only group."""
    fields = kind.scheme_fields()
    return {
        "config_groups": {
            "g": {"targets": ["Linear"], **fields, "weights": {**fields["weights"], **(weights or {})}, **changes}
        }
    }


STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
UNSUPPORTED: list[tuple[Kind, dict[str, Any], str]] = [
    (
        CT,
        {"quant_method": "bitsandbytes"},
        'quantization_config.quant_method\' = "bitsandbytes".*supported: compressed-tensors, gptq, awq, modelopt',
    ),
    (CT, {"format": "nvfp4-pack-quantized"}, "format.*supported: pack-quantized, int-quantized, float-quantized"),
    (CT, {"format": "float-quantized"}, 'weights.type\' = "int": weights in format float-quantized are of type float'),
    (CT, {"format": "mixed-precision"}, "format"),
    (CT, {"quantization_status": "frozen"}, "quantization_status"),
    (CT, {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    (CT, {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    (CT, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    (CT, {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16.*presets"),
    (CT, group(format="nvfp4-pack-quantized"), "config_groups.g.format"),
    (CT, group(weights={"type": "float"}), "weights.type"),
    (CT, group(weights={"num_bits": 3}), "weights.num_bits' = 3: only 4 and 8"),
    (CT, group(weights={"strategy": "block"}), "weights.strategy"),
    (CT, group(weights={"strategy": "tensor"}), "weights.strategy"),
    (CT, group(weights={"dynamic": True}), "weights.dynamic"),
    (CT, group(weights={"group_size": 16}), "weights.group_size' = 16: weights come in groups.*multiple of 32"),
    (CT, group(weights={"num_bits": 8, "group_size": 48}), "weights.group_size' = 48: .* 32 .*quantization='int8'"),
    (CT, group(Kind("pack-quantized", 8, -1, False)), "weights.symmetric' = false: 8-bit weights have no zero"),
    (CT, group(input_activations=STATIC), "input_activations.dynamic' = false: inputs are rounded"),
    (CT, group(input_activations={**STATIC, "type": "float"}), "input_activations.type"),
    (CT, group(output_activations=STATIC), "output_activations"),
    (GPTQ, {"bits": 3}, "bits' = 3"),
    (GPTQ, {"bits": 8, "sym": False}, "sym' = false: 8-bit"),
    (GPTQ, {"bits": 8, "group_size": -1, "sym": False}, "sym' = false: 8-bit"),
    (GPTQ, {"group_size": 48}, "group_size' = 48"),
    (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format"),
    (GPTQ, {"is_marlin_format": True}, "checkpoint_format"),
    (GPTQ, {"dynamic": {"-:.*down": {}}}, "dynamic"),
    (GPTQ, {"pack_dtype": "int16"}, "pack_dtype"),
    (AWQ, {"bits": 8}, "bits' = 8"),
    (AWQ, {"version": "gemv"}, 'version\' = "gemv"'),
    (AWQ, {"zero_point": False}, "zero_point"),
    (AWQ, {"backend": "llm-awq"}, "backend"),
    (AWQ, {"group_size": 16}, "group_size' = 16"),
]
DAMAGED: list[tuple[Kind, dict[str, Any], str]] = [
    (CT, {"quant_method": 4}, "quant_method"),
    (CT, {"config_groups": None}, "config_groups"),
    (CT, {"ignore": ["re:("]}, "ignore.*no regular expression"),
    (CT, {"ignore": [3]}, "ignore.*list of names"),
    (GPTQ, {"bits": None}, "bits.*is missing"),
    (GPTQ, {"group_size": "128"}, "group_size"),
    (AWQ, {"modules_to_not_convert": {"a": 1}}, "modules_to_not_convert"),
]


@pytest.mark.parametrize(
    ("error", "kind", "changes", "message"),
    [(UnsupportedError, *case) for case in UNSUPPORTED] + [(CheckpointError, *case) for case in DAMAGED],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_the_config_may_not_say(
    floats: Path, tmp_path: Path, error: type[Exception], kind: Kind, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text((floats / "config.json").read_text())
    edit_config(tmp_path, quantization_config=kind.config(**changes))
    with pytest.raises(error, match=f"^draft model: .*{message}"):
        ModelConfig.from_folder(tmp_path, "draft")


BAD_VALUES: list[tuple[Kind, str, Any, type[TrtSpecError], str]] = [
    (Kind("gptq", 4, 32, False), "qzeros", 15 << 4, UnsupportedError, "stored as 15 .*checkpoint_format gptq_v2"),
    (Kind("gptq", 4, 32), "qzeros", 8, CheckpointError, "is symmetric, but has zero point 9 .for 8.*checkpoint_format"),
    (Kind("gptq", 8, -1), "qzeros", 0, CheckpointError, "is symmetric, but has zero point 1 .for 128"),
    (Kind("gptq", 4, 32), "scales", float("nan"), CheckpointError, "scales that are not finite"),
    (Kind("gptq", 4, 32, scales=bf16), "scales", 1e5, UnsupportedError, "a scale of .*more than fp16's 65504"),
    (Kind("gptq", 8, 32, scales=bf16), "scales", 1e5, UnsupportedError, "a scale of .*more than fp16's 65504"),
    (Kind("gptq", 4, 32, ordered=True), "g_idx", 0, CheckpointError, "g_idx that does not give each group 32 inputs"),
    (Kind("gptq", 4, 32, ordered=True), "g_idx", -1, CheckpointError, "g_idx that does not give"),
    (Kind("pack-quantized"), "weight_shape", 7, CheckpointError, r"has weight_shape \[7, 7\], not \(8, 64\)"),
    (Kind("int-quantized", 4, 32), "weight", -9, CheckpointError, "weights that are not of 4 bits"),
    (
        Kind("int-quantized", 4, 32, False),
        "weight_zero_point",
        9,
        CheckpointError,
        "zero points that are not of 4 bits",
    ),
]


@pytest.mark.parametrize(("kind", "end", "value", "error", "message"), BAD_VALUES)
def test_values_nobody_can_hold(kind: Kind, end: str, value: Any, error: type[TrtSpecError], message: str) -> None:
    _, tensors = weights(kind, (8, 8), 64, seed=0)
    name = f"a.first.{end}"
    tensors[name] = torch.full_like(tensors[name], value)
    with pytest.raises(error, match=f"^target weights in folder: a.first.* {message}"):
        Fused((8, 8), 64).load(tensors, kind.config())


def test_words_of_another_dtype() -> None:
    _, tensors = weights(GPTQ, (8, 8), 64, seed=0)
    tensors["a.first.qweight"] = tensors["a.first.qweight"].float()
    with pytest.raises(WeightsError, match=r"a\.first\.qweight is torch\.float32, expected int32"):
        Fused((8, 8), 64).load(tensors, GPTQ.config())


@pytest.mark.parametrize(
    ("kind", "widths", "depth", "message"),
    [
        (Kind("gptq", 4, 64), (8, 8), 96, "its 96 inputs are no multiple of its groups of 64"),
        (Kind("pack-quantized", 8, 64), (8, 8), 96, "its 96 inputs are no multiple of its groups of 64"),
        (Kind("gptq", 4, -1), (8, 8), 48, "48 inputs with one scale are not a multiple of 32"),
        (Kind("gptq", 4, 32), (8, 12), 64, "12 outputs and 64 inputs do not fill int32 words of 8"),
        (Kind("awq", 4, 32, False), (4, 8), 64, "its 4 outputs do not fill int32 words of 8"),
        (Kind("pack-quantized", 4, -1), (8, 8), 33, "33 inputs"),
    ],
)
def test_shapes_nobody_can_hold(kind: Kind, widths: tuple[int, int], depth: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^target weights in folder: a.*{message}.*quantization="):
        Fused(widths, depth).load({}, kind.config())


def test_fused_linears_are_of_one_kind() -> None:
    both, gptq = Fused((8, 8), 64), Kind("gptq", 4, 32, ordered=True)
    with pytest.raises(
        UnsupportedError, match=r"a\.first is int4 in groups of 32 and a\.second is not, but they are one"
    ):
        both.load({}, AWQ.config(modules_to_not_convert=["second"]))
    for first, said in ((CT, "int4"), (Kind("pack-quantized", 8, 32), "int8 in groups of 32")):
        groups = {
            "x": {"targets": ["a.first"], **first.scheme_fields()},
            "y": {"targets": ["a.second"], **Kind("pack-quantized", 8, -1).scheme_fields()},
        }
        with pytest.raises(UnsupportedError, match=rf"a\.first is {said}.* and a\.second int8 per output channel"):
            both.load({}, CT.config(config_groups=groups))
    _, tensors = weights(gptq, (8, 8), 64, seed=0)
    tensors["a.second.g_idx"] = tensors["a.second.g_idx"].flip(0)
    with pytest.raises(UnsupportedError, match=r"a\.first, a\.second have their inputs in different orders"):
        both.load(tensors, gptq.config())


def test_tied_heads_are_no_integers(tmp_path: Path) -> None:
    folder, _ = quantised(make_checkpoint(tmp_path, "llama", tie_word_embeddings=True), tmp_path, GPTQ, lm_head=True)
    with pytest.raises(UnsupportedError, match=r"tie_word_embeddings.*untie"):
        ModelConfig.from_folder(folder)
    edit_config(folder, quantization_config=GPTQ.config())
    load_decoder(ModelConfig.from_folder(folder), torch.float32)


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [
        (Kind("gptq", 8, -1), ["int8"]),
        (Kind("gptq", 8, 32), ["int8"]),
        (Kind("gptq", 4, 128), ["int4_g128"]),
        (Kind("gptq", 4, 32), ["int4"]),
        (Kind("gptq", 4, -1), ["int4", "int4_g64", "int4_g128"]),
    ],
    ids=str,
)
def test_what_else_may_be_asked_for(kind: Kind, allowed: list[str]) -> None:
    found = CheckpointQuantization.read(Reader({"quantization_config": kind.config()}, Path("f"), "target"))
    assert found is not None
    found.check_request(None, "target")
    for word in ("int8", "int4", "int4_g64", "int4_g128"):
        if word in allowed:
            found.check_request(word, "target")
        else:
            with pytest.raises(
                ConfigError, match=f"quantization = '{word}': the draft's checkpoint is quantised already"
            ):
                found.check_request(word, "draft")
