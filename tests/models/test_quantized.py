"""Weights that are integers in the checkpoint: every layout and option loads as exactly the matrix it stands for."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.checkpoints import edit_config, edit_tensors, oracle, oracle_logits
from tests.models import quantized_linears
from tests.models.quantized_linears import Fused, bf16, fp32, matrix_of, weights
from tests.models.test_logits_vs_transformers import Paged
from tests.quantized_checkpoints import Kind, linears, quantised, rounded, stored
from trtspec.cli import main
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.config.checkpoint.reader import Reader
from trtspec.errors import CheckpointError, WeightsError
from trtspec.models.layers import Linear, weight_bytes
from trtspec.models.pack_weights import pack_decoder
from trtspec.models.weights import load_decoder, load_weights, loaded_bytes

floats = quantized_linears.floats
KINDS = [
    *(Kind("pack-quantized", 4, size, symmetric) for size in (32, 64, 128, -1) for symmetric in (True, False)),
    Kind("pack-quantized", 4, 64, True, ordered=True),
    Kind("pack-quantized", 4, 128, False, scales=bf16),
    Kind("pack-quantized", 8, -1, scales=bf16),
    Kind("int-quantized", 8, -1, scales=fp32),
    *(Kind("pack-quantized", 8, size) for size in (32, 64, 128)),
    Kind("pack-quantized", 8, 64, ordered=True),
    Kind("pack-quantized", 8, 96, scales=bf16),  # held as groups of 32
    Kind("int-quantized", 8, 256),  # held as groups of 128
    Kind("int-quantized", 4, 32, False),
    *(Kind("gptq", 4, size, symmetric) for size in (32, 128, -1) for symmetric in (True, False)),
    *(Kind(layout, 4, 32, False, ordered=True) for layout in ("gptq", "gptq_v2")),
    Kind("gptq_v2", 4, 64, False),
    Kind("gptq", 8, -1),
    Kind("gptq_v2", 8, -1, ordered=True),
    Kind("gptq", 8, 32, ordered=True),
    *(Kind("awq", 4, size, False) for size in (32, 64, 128, -1)),
    Kind("awq", 4, 256, False),  # held as groups of 128
    Kind("gptq", 4, 96),  # held as groups of 32
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=8, deadline=None)
@given(octets=st.tuples(st.integers(1, 12), st.integers(1, 12)), groups=st.integers(1, 3), seed=st.integers(0, 999))
def test_every_weight_is_what_it_stands_for(kind: Kind, octets: tuple[int, int], groups: int, seed: int) -> None:
    widths = (8 * octets[0], 8 * octets[1])
    depth = groups * (32 if kind.group_size == -1 else kind.group_size)
    made, tensors = weights(kind, widths, depth, seed)
    linear = Fused(widths, depth).load(tensors, kind.config())
    assert torch.equal(matrix_of(linear), torch.cat([part.matrix for part in made]))
    assert linear.weight.dtype == (torch.int8 if kind.bits == 8 else torch.uint8)
    assert linear.scales.dtype == (fp32 if kind.bits == 8 and kind.group_size == -1 else torch.float16)
    assert bool(linear.zeros.numel()) == (not kind.symmetric)
    assert not kind.ordered or groups == 1 or kind.group_size == -1 or linear.order.numel() == depth


@pytest.mark.parametrize(
    "kind",
    [Kind("gptq", 4, 64), Kind("gptq", 8, -1), Kind("pack-quantized", 4, 32), Kind("pack-quantized", 8, 32)],
    ids=str,
)
def test_outputs_are_those_of_the_matrix(kind: Kind) -> None:
    """Outputs differ from the matrix's by at most half a rounding step of x to int8 for each of 128 inputs.

    A step is a 254th of the range of x.
    """
    made, tensors = weights(kind, (24, 40), 128, seed=1)
    linear = Fused((24, 40), 128).eval().load(tensors, kind.config())
    x = torch.randn(5, 128)
    matrix = torch.cat([part.matrix for part in made])
    bound = x.abs().amax(1, keepdim=True) / 254 * matrix.abs().sum(1)
    assert ((linear(x) - x @ matrix.T).abs() <= bound + 1e-5).all()


@pytest.mark.parametrize("kind", [Kind("gptq", 4, 32, False, ordered=True), Kind("gptq", 8, 32, ordered=True)], ids=str)
def test_inputs_in_another_order_reach_their_groups(kind: Kind) -> None:
    made, tensors = weights(kind, (8, 8), 128, seed=2)
    linear = Fused((8, 8), 128).eval().load(tensors, kind.config())
    x = torch.randn(3, 128)
    torch.testing.assert_close(linear(x), x @ torch.cat([part.matrix for part in made]).T, rtol=0, atol=0.05)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_parts_may_differ(bits: int) -> None:
    """Two parts in groups of 128 and of 64 load as one linear whose groups have the smaller size."""
    kinds = (Kind("pack-quantized", bits, 128), Kind("pack-quantized", bits, 64, symmetric=bits == 8))
    generator = torch.Generator().manual_seed(0)
    made = [rounded(torch.randn(16, 128, generator=generator), kind) for kind in kinds]
    tensors = {
        f"a.{name}.{end}": tensor
        for name, part, kind in zip(("first", "second"), made, kinds, strict=True)
        for end, tensor in stored(part, kind).items()
    }
    groups = {
        name: {"targets": [f"re:.*{name}$"], **kind.scheme_fields()}
        for name, kind in zip(("first", "second"), kinds, strict=True)
    }
    linear = Fused((16, 16), 128).load(tensors, kinds[0].config(config_groups=groups))
    assert torch.equal(matrix_of(linear), torch.cat([part.matrix for part in made]))
    assert linear.scales.shape == (1, 2, 32)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [Kind("gptq", 4, 32), Kind("pack-quantized", 4, 32, False)], ids=str)
def test_a_linear_is_packed_as_soon_as_it_is_there(kind: Kind, seed: int) -> None:
    """A linear is packed once its last tensor has arrived, in whatever order the tensors come.

    The tensors are not kept, and another copy of one changes nothing.
    """
    made, tensors = weights(kind, (8, 16), 64, seed)
    module, alive = Fused((8, 16), 64), []

    def arriving() -> Iterator[tuple[str, Tensor]]:
        for i in torch.randperm(len(tensors), generator=torch.Generator().manual_seed(seed)).tolist():
            assert not module.both.is_packed
            tensor = list(tensors.values())[i].clone()
            alive.append(weakref.ref(tensor))
            yield list(tensors)[i], tensor
        del tensor
        assert module.both.is_packed
        name = "a.first.qweight" if kind.layout == "gptq" else "a.first.weight_packed"
        yield name, torch.zeros_like(tensors[name])
        assert not any(ref() is not None for ref in alive)

    quantization = CheckpointQuantization.read(Reader({"quantization_config": kind.config()}, Path("folder"), "target"))
    load_weights(module, module.slots, arriving(), Path("folder"), "target", quantization)
    assert torch.equal(matrix_of(module.both), torch.cat([part.matrix for part in made]))


def test_orders_may_be_left_out() -> None:
    """g_idx, the order of inputs, may be missing where the writer of gptq did not reorder inputs; one part lacks it."""
    made, tensors = weights(Kind("gptq", 4, 32), (8, 8), 64, seed=0)
    del tensors["a.second.g_idx"]
    linear = Fused((8, 8), 64).load(tensors, Kind("gptq", 4, 32).config())
    assert torch.equal(matrix_of(linear), torch.cat([part.matrix for part in made]))


def test_names_win_over_expressions_and_those_over_classes() -> None:
    kinds = {"Linear": Kind("pack-quantized", 4, 32), "re:.*mlp": Kind("pack-quantized", 4, 64)}
    kinds["model.mlp.up"] = Kind("pack-quantized", 8, -1)
    groups = {str(i): {"targets": [target], **kind.scheme_fields()} for i, (target, kind) in enumerate(kinds.items())}
    data = kinds["Linear"].config(config_groups=groups, ignore=["lm_head", r"re:.*\.down$"])
    found = CheckpointQuantization.read(Reader({"quantization_config": data}, Path("f"), "target"))
    assert found is not None
    names = ("model.attn", "model.mlp.gate", "model.mlp.up", "model.mlp.down", "lm_head")
    assert [str(found.scheme(name)) for name in names] == [
        "int4 in groups of 32", "int4 in groups of 64", "int8 per output channel", "None", "None",
    ]  # fmt: skip


# -- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        Kind("awq", 4, 128, False),
        Kind("gptq", 4, 32, ordered=True),
        Kind("gptq", 8, -1),
        Kind("pack-quantized", 8, 32),
        Kind("gptq", 8, 64),
    ],
    ids=str,
)
def test_a_model_computes_what_its_floats_do(floats: Path, tmp_path: Path, kind: Kind) -> None:
    """Logits are close to transformers' on the dequantised weights, fp32; only rounding of rows to int8 differs."""
    folder, plain = quantised(floats, tmp_path, kind)
    decoder = load_decoder(ModelConfig.from_folder(folder), torch.float32)
    tokens = torch.randint(64, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = oracle_logits(oracle(plain), tokens)
    error = Paged(decoder, 1).step({0: tokens})[0] - expected
    assert error.norm() <= 0.05 * expected.norm()
    assert weight_bytes(decoder) == loaded_bytes(ModelConfig.from_folder(folder)) + order_bytes(decoder)


def order_bytes(decoder: nn.Module) -> int:
    return sum(part.order.nbytes for part in decoder.modules() if isinstance(part, Linear))


def test_a_quantised_head(floats: Path, tmp_path: Path) -> None:
    folder, _ = quantised(floats, tmp_path, Kind("gptq", 4, 128), keep=(), lm_head=True)
    decoder = load_decoder(ModelConfig.from_folder(folder), torch.bfloat16)
    assert decoder.head.weight.dtype == torch.uint8
    assert decoder.logits(torch.randn(2, 128).bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match="lm_head is quantised already; leave lm_head_quantization unset"):
        pack_decoder(decoder, lm_head="int8")
    pack_decoder(decoder)


def test_linears_that_were_left_alone(floats: Path, tmp_path: Path) -> None:
    """Linears are left unquantised where each method's own field says so."""
    for kind, fields in (
        (Kind("awq", 4, 64, False), {"modules_to_not_convert": ["o_proj"]}),
        (
            Kind("gptq", 4, 64),
            {
                "modules_in_block_to_quantize": [
                    [n] for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
                ]
                + [["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]]
            },
        ),
    ):
        folder, _ = quantised(floats, tmp_path / kind.layout, kind, keep=("lm_head", "o_proj"), **fields)
        layer = load_decoder(ModelConfig.from_folder(folder), torch.float32).layers[0]
        assert layer.attention.o.weight.dtype == torch.float32
        assert layer.attention.qkv.weight.dtype == torch.uint8


def test_biases_of_zeros_are_early_gptqs(floats: Path, tmp_path: Path) -> None:
    folder, _ = quantised(floats, tmp_path, Kind("gptq", 4, 128, scales=bf16))
    name = "model.layers.0.mlp.down_proj.bias"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(128)}))
    load_decoder(ModelConfig.from_folder(folder), torch.float32)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(128)}))
    with pytest.raises(WeightsError, match=f"unexpected: {name}"):
        load_decoder(ModelConfig.from_folder(folder), torch.float32)


def test_missing_and_misshaped_tensors(floats: Path, tmp_path: Path) -> None:
    folder, _ = quantised(floats, tmp_path, Kind("gptq", 4, 64, scales=fp32))
    prefix = "model.layers.1.mlp.up_proj."
    edit_tensors(folder, lambda t: (t.pop(prefix + "qzeros"), t.update({prefix + "scales": torch.ones(2, 255)})))
    with pytest.raises(WeightsError) as caught:
        load_decoder(ModelConfig.from_folder(folder), torch.float32)
    assert f"missing: {prefix}qzeros (2, 32)" in str(caught.value)
    assert f"{prefix}scales is (2, 255), expected (2, 256)" in str(caught.value)


def test_what_is_missing_is_said_before_what_is_damaged(floats: Path, tmp_path: Path) -> None:
    """A missing tensor is reported before damaged scales.

    The linear with damaged scales is complete, and is packed before the loader finds that another linear is incomplete.
    """
    folder, _ = quantised(floats, tmp_path, Kind("gptq", 4, 64))
    scales, gone = "model.layers.0.mlp.down_proj.scales", "model.layers.1.mlp.up_proj.qzeros"
    edit_tensors(folder, lambda tensors: tensors[scales].fill_(float("nan")))
    whole = load_file(folder / "model.safetensors")
    edit_tensors(folder, lambda tensors: tensors.pop(gone))
    with pytest.raises(WeightsError, match=f"missing: {gone}"):
        load_decoder(ModelConfig.from_folder(folder), torch.float32)
    edit_tensors(folder, lambda tensors: tensors.update(whole))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj has scales that are not finite"):
        load_decoder(ModelConfig.from_folder(folder), torch.float32)


def test_info_says_what_is_held_and_what_is_not(
    floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = quantised(floats, tmp_path, Kind("awq", 4, 64, False))
    assert main(["info", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "awq, int4 in groups of 64" in shown
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    assert main(["info", str(folder)]) == 1
    assert "supported: compressed-tensors, gptq, awq" in " ".join(capsys.readouterr().err.split())


def test_the_tensors_are_those_of_the_names(floats: Path) -> None:
    """The helper `linears` finds the weights of all modules that are linears in transformers."""
    assert len(list(linears(load_file(floats / "model.safetensors")))) == 2 * 7 + 1


# -- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 128)])
def test_scales_that_fp16_cannot_hold_move_as_little_as_said(
    caplog: pytest.LogCaptureFixture, bits: int, steps: int
) -> None:
    kind = Kind("gptq", bits, 32, scales=bf16)
    for smallest, exact in ((2.0**-17, True), (2.0**-22, False)):
        caplog.clear()
        made, tensors = weights(kind, (8, 8), 32, seed=0)
        tensors["a.first.scales"] = torch.tensor([[1.9921875 * smallest] * 8], dtype=bf16)
        with caplog.at_level(logging.WARNING):
            linear = Fused((8, 8), 32).load(tensors, kind.config())
        expected = (made[0].values - 2 ** (bits - 1)).float() * tensors["a.first.scales"].float().T
        moved = (matrix_of(linear)[:8] - expected).abs().max()
        assert (moved == 0) == exact
        assert moved <= steps * 2.0**-25
        said = re.search(r"8 scales do not fit fp16 and were rounded; a weight moves by at most (\S+),", caplog.text)
        assert (said is None) == exact
        assert said is None or moved <= float(said[1]) <= steps * 2.0**-25
