"""Weights that are float8_e4m3fn in the checkpoint.

Each layout and option loads as exactly the matrix it stands for. Inputs are rounded where the checkpoint says so.
Weights that cannot be held are refused by name.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import edit_config, edit_tensors, make_checkpoint, oracle, oracle_logits
from tests.fp8_checkpoints import FP8, Fp8Kind, fp8, round_inputs
from tests.models.quantized_linears import Fused, matrix_of
from tests.models.test_logits_vs_transformers import Paged
from tests.quantized_checkpoints import Kind
from trtspec.cli import main
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.config.checkpoint.reader import Reader
from trtspec.errors import CheckpointError, ConfigError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.models.layers import weight_bytes
from trtspec.models.weights import describe_decoder, load_decoder, loaded_bytes

MODELOPT, BESIDE = Fp8Kind("modelopt"), Fp8Kind("hf_quant_config")
TENSORS = Fp8Kind("compressed-tensors")
KINDS = [
    MODELOPT,
    BESIDE,
    Fp8Kind("modelopt", per_channel=True, inputs="dynamic"),
    TENSORS,
    Fp8Kind("compressed-tensors", per_channel=True, inputs="static"),
    Fp8Kind("compressed-tensors", per_channel=True, inputs="dynamic"),
    Fp8Kind("compressed-tensors", inputs=None),
]
SCALES = {"a.first": 0.01, "a.second": 0.02}


def stored(kind: Fp8Kind, widths: tuple[int, int] = (8, 24), depth: int = 50, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [(name, torch.randn(n, depth, generator=generator)) for name, n in zip(SCALES, widths, strict=True)]
    return {
        f"{name}.{end}": tensor for name, weight in parts for end, tensor in kind.stored(weight, SCALES[name]).items()
    }


def part(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(name)}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not BESIDE], ids=str)
@pytest.mark.parametrize(("widths", "depth"), [((8, 24), 50), ((1, 1), 1), ((40, 33), 128)])
def test_every_weight_is_what_it_stands_for(kind: Fp8Kind, widths: tuple[int, int], depth: int) -> None:
    """Loaded weights equal the stored matrices; parts of one fused matrix keep their own scales.

    The larger input scale applies to both parts.
    """
    tensors = stored(kind, widths, depth)
    linear = Fused(widths, depth).load(tensors, kind.config())
    assert linear.weight.dtype == FP8
    assert torch.equal(matrix_of(linear), torch.cat([kind.matrix(part(tensors, name)) for name in SCALES]))
    assert linear.x_scale.tolist() == ([tensors["a.second.input_scale"].item()] if kind.inputs == "static" else [])


@pytest.mark.parametrize("kind", [TENSORS, Fp8Kind("compressed-tensors", True, "dynamic")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_are_those_of_the_formula(kind: Fp8Kind, dtype: torch.dtype) -> None:
    tensors = stored(kind)
    linear = Fused((8, 24), 50).eval().load(tensors, kind.config())
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    read = x.double()
    if kind.inputs == "static":
        assert (x.abs() > 448 * 0.02).any()  # some are clamped
        read = (x.float() / 0.02).clamp(-448, 448).to(FP8).double() * 0.02
    exact = read @ torch.cat([kind.matrix(part(tensors, name)) for name in SCALES]).double().T
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(linear(x).double(), exact, rtol=rounding, atol=1e-4)


def read(config: dict[str, Any], hf_quant_config: dict[str, Any] | None = None) -> CheckpointQuantization:
    given = None if hf_quant_config is None else Reader(hf_quant_config, Path("hf_quant_config.json"), "target")
    found = CheckpointQuantization.read(Reader(config, Path("config.json"), "target"), given)
    assert found is not None
    return found


def test_what_is_excluded() -> None:
    """Linears are excluded by name, by wildcard, or with the module that contains them."""
    names = ["lm_head", "model.layers.1", "*.o_proj", "model.layers.2.mlp*"]
    for found in (
        read({"quantization_config": MODELOPT.config(ignore=names)}),
        read({}, BESIDE.config(exclude_modules=names)),
        read({"quantization_config": {"quant_method": "modelopt", **BESIDE.config(exclude_modules=names)}}),
    ):
        kept = (
            "lm_head",
            "model.layers.1.mlp.up_proj",
            "model.layers.0.self_attn.o_proj",
            "model.layers.2.mlp.up_proj",
        )
        assert [found.scheme(name) for name in kept] == [None] * 4
        assert str(found.scheme("model.layers.10.mlp.up_proj")) == "fp8 per tensor, its inputs too"
        assert found.kv_scales


def test_config_json_goes_first() -> None:
    assert read({"quantization_config": Kind("gptq").config()}, BESIDE.config()).method == "gptq"


def test_nothing_else_may_be_asked_for() -> None:
    found = read({"quantization_config": MODELOPT.config()})
    found.check_request(None, "target")
    with pytest.raises(ConfigError, match=r"'int8': the target's checkpoint is quantised already .modelopt, fp8 per"):
        found.check_request("int8", "target")


# -- whole models -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 64}
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints"), "qwen2", **sizes, initializer_range=0.1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_model_computes_what_its_floats_do(floats: Path, tmp_path: Path, kind: Fp8Kind) -> None:
    """Logits equal those of transformers on the dequantised weights, fp32, up to single roundings to e4m3.

    Where inputs are to be rounded, torch's cast rounds them in transformers too. The rest are single roundings to e4m3
    that fall the other way. Without torch's cast the difference is about 4 %.
    """
    folder, plain, scales = fp8(floats, tmp_path, kind)
    config = ModelConfig.from_folder(folder)
    decoder = load_decoder(config, torch.float32)
    tokens = torch.randint(64, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    logits, theirs = Paged(decoder, 1).step({0: tokens})[0], oracle(plain)
    exact = oracle_logits(theirs, tokens)
    assert (logits - exact).norm() <= (0.1 if kind.inputs == "static" else 1e-5) * exact.norm()
    if kind.inputs == "static":
        assert (logits - exact).norm() > 0.01 * exact.norm()  # inputs were rounded
        round_inputs(theirs, scales)
        assert (logits - oracle_logits(theirs, tokens)).norm() <= 8e-3 * exact.norm()
    described = describe_decoder(config, torch.float32)
    assert weight_bytes(decoder) == weight_bytes(described) == loaded_bytes(config)
    assert decoder.layers[0].mlp.down.weight.nbytes == 128 * 256  # one byte per weight


@pytest.mark.parametrize("inputs", ["static", None])
def test_logits_are_those_of_transformers_on_the_same_folder(floats: Path, tmp_path: Path, inputs: str | None) -> None:
    """Logits equal those of transformers, in which compressed-tensors reads the folder and rounds inputs."""
    folder, _, _ = fp8(floats, tmp_path, Fp8Kind("compressed-tensors", inputs=inputs), alike=True)
    tokens = torch.randint(64, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    theirs = oracle_logits(oracle(folder), tokens)
    decoder = load_decoder(ModelConfig.from_folder(folder), torch.float32)
    error = Paged(decoder, 1).step({0: tokens})[0] - theirs
    assert error.norm() <= 8e-3 * theirs.norm()


def test_scales_of_a_cache_in_fp8_are_left_alone(
    floats: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Scales of an fp8 KV cache are not used where the config names such a cache; elsewhere they are unexpected."""
    folder, _, _ = fp8(floats, tmp_path, MODELOPT)
    with caplog.at_level(logging.WARNING):
        load_decoder(ModelConfig.from_folder(folder), torch.float32)
    assert "scales of an fp8 KV cache are not used" in caplog.text
    spare = "model.layers.0.mlp.up_proj.k_scale"
    edit_tensors(folder, lambda tensors: tensors.update({spare: torch.ones(1)}))
    with pytest.raises(WeightsError, match=f"unexpected: {spare}"):
        load_decoder(ModelConfig.from_folder(folder), torch.float32)
    edit_tensors(folder, lambda tensors: tensors.pop(spare))
    edit_config(folder, quantization_config=MODELOPT.config(kv_cache_scheme=None))
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.0\.self_attn\.k_proj\.k_scale"):
        load_decoder(ModelConfig.from_folder(folder), torch.float32)


def test_missing_and_misshaped_tensors(floats: Path, tmp_path: Path) -> None:
    folder, _, _ = fp8(floats, tmp_path, TENSORS)
    up, down = "model.layers.1.mlp.up_proj.", "model.layers.1.mlp.down_proj."
    edit_tensors(folder, lambda t: (t.pop(up + "input_scale"), t.update({down + "weight_scale": torch.ones(128, 1)})))
    with pytest.raises(WeightsError) as caught:
        load_decoder(ModelConfig.from_folder(folder), torch.float32)
    assert f"missing: {up}input_scale (1,)" in str(caught.value)
    assert f"{down}weight_scale is (128, 1), expected (1,)" in str(caught.value)


def test_info_says_what_is_held(floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, _ = fp8(floats, tmp_path, BESIDE)
    assert main(["info", str(folder)]) == 0
    assert "modelopt, fp8 per tensor" in " ".join(capsys.readouterr().out.split())


# -- refusals ---------------------------------------------------------------------------------------------------------


def group(weights: dict[str, Any] | None = None, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    fields = TENSORS.scheme_fields()
    fields["weights"] |= weights or {}
    fields["input_activations"] |= inputs or {}
    return {"config_groups": {"g": {"targets": ["Linear"], **fields}}}


REFUSED: list[tuple[Fp8Kind, dict[str, Any], str]] = [
    (MODELOPT, {"quant_algo": "NVFP4"}, 'quant_algo\' = "NVFP4".*supported: FP8, FP8_PER_CHANNEL_PER_TOKEN; or use'),
    (MODELOPT, {"kv_cache_scheme": {"type": "float", "num_bits": 4}}, "kv_cache_scheme"),
    (MODELOPT, {"quant_method": "fp8"}, 'quant_method\' = "fp8": this fp8 layout is not supported; use'),
    (
        MODELOPT,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        r"weight_block_size' = \[128, 128\]: fp8 weights with a scale for each block are not supported; use a "
        "checkpoint of modelopt",
    ),
    (TENSORS, group({"strategy": "block"}), 'weights.strategy\' = "block": only tensor and channel are supported; use'),
    (TENSORS, group({"type": "int"}), "weights.type"),
    (TENSORS, group({"num_bits": 4}), "weights.num_bits"),
    (TENSORS, group({"symmetric": False}), "weights.symmetric"),
    (TENSORS, group({"dynamic": True}), "weights.dynamic"),
    (TENSORS, group(inputs={"type": "int"}), "input_activations.type"),
    (TENSORS, group(inputs={"strategy": "group"}), "input_activations.strategy"),
    (TENSORS, group(inputs={"strategy": "token"}), 'input_activations.strategy\' = "token": stored scales of inputs'),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED, ids=lambda value: None)
def test_what_the_config_may_not_say(kind: Fp8Kind, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^target model: config.json: .*{message}"):
        read({"quantization_config": kind.config(**changes)})


def test_the_file_next_to_it_is_named() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^target model: hf_quant_config\.json: field 'quantization\.quant_algo"
    ):
        read({}, BESIDE.config(quant_algo="FP8_PB_WO"))
    with pytest.raises(UnsupportedError, match=r"quantization\.kv_cache_quant_algo' = \"NVFP4\""):
        read({}, BESIDE.config(kv_cache_quant_algo="NVFP4"))


@pytest.mark.parametrize(
    ("end", "value", "message"),
    [
        ("input_scale", 0.0, "has input_scale 0, which is no step"),
        ("input_scale", float("inf"), "has input_scale inf"),
        ("weight_scale", float("nan"), "has a weight_scale that is not positive and finite"),
        ("weight_scale", -1.0, "has a weight_scale that is not positive"),
        ("weight", float("nan"), "has weights that are NaN"),
    ],
)
def test_values_nobody_can_hold(end: str, value: float, message: str) -> None:
    tensors = stored(MODELOPT)
    tensors[f"a.second.{end}"] = torch.full(tensors[f"a.second.{end}"].shape, value).to(
        tensors[f"a.second.{end}"].dtype
    )
    with pytest.raises(CheckpointError, match=f"^target weights in folder: a.second {message}"):
        Fused((8, 24), 50).load(tensors, MODELOPT.config())


@pytest.mark.parametrize(("end", "wanted"), [("weight", "float8_e4m3fn"), ("input_scale", "floating-point numbers")])
def test_tensors_of_another_dtype(end: str, wanted: str) -> None:
    tensors = stored(MODELOPT)
    tensors[f"a.first.{end}"] = tensors[f"a.first.{end}"].float().to(torch.int32)
    with pytest.raises(WeightsError, match=rf"a\.first\.{end} is torch\.int32, expected {wanted}"):
        Fused((8, 24), 50).load(tensors, MODELOPT.config())


@pytest.mark.parametrize(
    "other", [Fp8Kind("compressed-tensors", inputs="dynamic"), Kind("int-quantized", 8, -1), None], ids=str
)
def test_fused_linears_are_of_one_kind(other: Any) -> None:
    groups = {"x": {"targets": ["a.first"], **TENSORS.scheme_fields()}}
    if other is not None:
        groups["y"] = {"targets": ["a.second"], **other.scheme_fields()}
        groups["y"]["format"] = "int-quantized" if isinstance(other, Kind) else "float-quantized"
    wanted: tuple[type[TrtSpecError], str] = (
        UnsupportedError,
        r"a\.first is fp8 per tensor, its inputs too and a\.sec",
    )
    with pytest.raises(wanted[0], match=wanted[1]):
        Fused((8, 8), 32).load({}, TENSORS.config(config_groups=groups))
