"""packed_linear and packed_embedding in the Triton language against the references, and their instructions.

make test runs these tests in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels on the CPU: make test", allow_module_level=True)

from trtspec_plugins.triton import linear
from trtspec_plugins.triton.embedding import packed_embedding
from trtspec_plugins.triton.linear import packed_linear
from trtspec_plugins.triton.linear_quantized import quantize_rows, round_rows

from tests.plugins.interpreter import fast_interpreter  # noqa: F401
from tests.plugins.packed_layers import FP8, GROUPS, random_int8_groups, random_rows
from trtspec.ops.linear import _quantize, _reference, round_e4m3
from trtspec.ops.packing import pack_fp8, pack_int4, pack_int8, pack_panels, packed_rows, quantize_int4, quantize_int8

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, for infinity and NaN

NONE = torch.empty(0)
EPSILON = {torch.float32: 2**-24, torch.float16: 2**-11}  # of one rounding; the interpreter gets bf16 wrong
LAYOUTS = ["plain", "int8", *GROUPS, *FP8]
CONFIGURATIONS = ["few", "narrow", "many"]

dtypes = st.sampled_from(list(EPSILON))
row_counts = st.integers(1, 40) | st.sampled_from([64, 65, 130])
# Depths and widths around the edges of steps (32, 64 or 128 inputs), pieces and tiles of columns.
depths = st.sampled_from([1, 16, 127, 128, 129, 255, 512, 1000, 1030]) | st.integers(1, 300)
widths = st.sampled_from([1, 31, 32, 33, 64, 65, 128, 130]) | st.integers(1, 100)


@contextmanager
def configured(name: str) -> Iterator[None]:
    """Use the kernel for few or for many rows, for any number; narrow: with programs of few columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "MANY_ROWS", 2**31 if name == "few" else 0)
        patch.setattr(linear, "MANY_PROGRAMS", 0)
        patch.setattr(linear, "NARROW_ROWS", 0 if name == "many" else 2**31)
        yield


class Layer:
    """A random matrix [N, K] in one of the layouts; the depth is rounded up to whole groups."""

    def __init__(self, layout: str, dtype: torch.dtype, width: int, depth: int) -> None:
        g = torch.Generator().manual_seed(1000 * width + depth)
        depth += -depth % GROUPS.get(layout, 1)
        weight = torch.randn(width, depth, generator=g).to(dtype)
        self.layout, self.width, self.depth = layout, width, depth
        self.scales = self.zeros = NONE
        self.x_scale = torch.tensor([0.37]) if layout == "fp8-static" else None
        if layout == "plain":
            self.weight = weight
        elif layout == "int8":
            self.weight, self.scales = quantize_int8(weight)
        elif layout in FP8:
            octets = torch.randint(127, (width, depth), generator=g, dtype=torch.uint8)  # all finite numbers
            values = (octets | octets.flip(-1) << 7).view(torch.float8_e4m3fn)
            self.weight, self.scales = pack_fp8(values, weight[:, 0].abs() / 64)
        elif layout.startswith("int8-"):
            self.weight, self.scales, self.zeros = random_int8_groups(width, depth, GROUPS[layout])
        else:  # half of the layers have no zeros
            self.weight, self.scales, self.zeros = quantize_int4(weight, GROUPS[layout], symmetric=width % 2 == 0)

    def __call__(self, x: Tensor, bias: Tensor | None = None, float_out: bool = False) -> Tensor:
        return packed_linear(x, *self.arguments(bias, float_out))

    def reference(self, x: Tensor, bias: Tensor | None = None, float_out: bool = False) -> Tensor:
        return _reference(x, *self.arguments(bias, float_out))

    def arguments(self, bias: Tensor | None, float_out: bool) -> tuple[object, ...]:
        return self.weight, self.scales, self.zeros, bias, self.x_scale, self.width, float_out


def check(layer: Layer, x: Tensor, bias: Tensor | None, float_out: bool) -> None:
    """Check integers for the reference's bits, others against float64: no rounding exceeds half a unit of all terms."""
    out = layer(x, bias, float_out)
    wanted = layer.reference(x, bias, float_out)
    assert out.dtype == wanted.dtype
    if layer.layout in ("int8", *GROUPS):
        assert torch.equal(out, wanted)
        return
    read = x.double() if layer.x_scale is None else round_e4m3(x, layer.x_scale).double() * layer.x_scale.double()
    dense = layer.weight.double()
    if layer.layout != "plain":
        dense = packed_rows(torch.arange(layer.width), layer.weight, layer.scales, NONE, layer.depth).double()
    exact, terms = read @ dense.T, read.abs() @ dense.abs().T
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    roundings = 2 * layer.depth + 16  # in fp32: K products, as many additions, pieces, scale and bias
    rounding = 0.0 if float_out else EPSILON[out.dtype]  # to x's dtype
    assert ((out.double() - exact).abs() <= roundings * 2**-24 * terms + rounding * exact.abs() + 1e-7).all()


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(
    layout=st.sampled_from(LAYOUTS),
    configuration=st.sampled_from(CONFIGURATIONS),
    dtype=dtypes,
    rows=row_counts,
    depth=depths,
    width=widths,
    bias=st.booleans(),
    float_out=st.booleans(),
)
def test_products_are_the_references(
    layout: str,
    configuration: str,
    dtype: torch.dtype,
    rows: int,
    depth: int,
    width: int,
    bias: bool,
    float_out: bool,
) -> None:
    layer = Layer(layout, dtype, width, depth)
    with configured(configuration):
        check(layer, random_rows(dtype, rows, layer.depth), torch.randn(width).to(dtype) if bias else None, float_out)


def test_each_configuration_serves_some_sizes() -> None:
    sizes = [(rows, width) for rows in (4, 64, 65, 2048) for width in (512, 16384)]
    taken = {size: linear.tiling(*size, torch.bfloat16) for size in sizes}
    many = {size: columns for size, (many, _, columns) in taken.items() if many}
    assert many == {(65, 16384): 64, (2048, 16384): 128}


# --- the order of additions -------------------------------------------------------------------------------------------
# The interpreter multiplies matrices with numpy, whose order of additions may depend on their shape. A GPU's
# instruction does not do so, as test_the_same_instruction_multiplies_everywhere has to show. Here every piece's sum is
# exact in any order, and the pieces are of such sizes that fp32 rounds when they are added.


def uneven_pieces(dtype: torch.dtype, width: int, piece: int, count: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return x [rows, count * piece], weight [width, ...]: small integers, times a power of two for each piece of K."""
    g = torch.Generator().manual_seed(7)
    x = torch.randint(-8, 9, (rows, count * piece), generator=g).float()
    weight = torch.randint(-8, 9, (width, count * piece), generator=g).float()
    sizes = 2.0 ** torch.tensor([0, 11, 4, -9, 7, -4, 12, -7] * count)[:count]
    return x.to(dtype), (weight * sizes.repeat_interleave(piece)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
def test_pieces_are_added_in_order_whatever_the_rows(dtype: torch.dtype) -> None:
    width, step = 40, 128 // dtype.itemsize
    steps = linear.pieces(width, 24 * step, step)
    assert 24 // steps == 6
    x, weight = uneven_pieces(dtype, width, steps * step, 6, 70)
    sums = [(a.double() @ b.double().T).float() for a, b in zip(x.chunk(6, 1), weight.chunk(6, 1), strict=True)]
    in_order, backwards = torch.zeros(70, width), torch.zeros(70, width)
    for a, b in zip(sums, reversed(sums), strict=True):
        in_order, backwards = in_order + a, backwards + b
    assert not torch.equal(in_order, backwards)

    def multiply(rows: Tensor) -> Tensor:
        return packed_linear(rows, weight, NONE, NONE, None, None, width, True)

    for configuration in CONFIGURATIONS:
        with configured(configuration):
            for rows in (1, 2, 16, 17, 33, 70):
                assert torch.equal(multiply(x[:rows]), in_order[:rows]), (configuration, rows)
            assert torch.equal(torch.cat([multiply(row) for row in x[:5].split(1)]), in_order[:5])


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_follow_from_the_matrix(layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pieces follows from N, K and dtypes: a launch of any number of rows passes nothing else."""
    asked = []

    def pieces(*arguments: int) -> int:
        asked.append(arguments)
        return 2

    monkeypatch.setattr(linear, "pieces", pieces)
    layer = Layer(layout, dtype, 40, 600)
    for rows in (1, 40):
        layer(random_rows(dtype, rows, layer.depth))
    block = 32 if layout != "int8" and dtype == torch.float32 else 64 if layout == "plain" else 128
    assert asked == ([] if layout in GROUPS else [(40, 600, block)] * 2)


@settings(max_examples=100, deadline=None)
@given(width=st.integers(1, 200_000), depth=st.integers(1, 40_000), block=st.sampled_from([32, 64, 128]))
def test_pieces_cover_the_depth(width: int, depth: int, block: int) -> None:
    steps, all_steps = linear.pieces(width, depth, block), -(-depth // block)
    count = -(-all_steps // steps)
    assert count == 1 or (steps >= linear.LEAST_STEPS and -(-width // linear.COLUMNS) * count <= linear.PROGRAMS)


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 20_000), width=st.integers(1, 20_000), dtype=dtypes)
def test_there_is_a_counter_for_each_tile_of_few_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    many, tile_rows, tile_columns = linear.tiling(rows, width, dtype)
    split = linear.pieces(width, 2**20, 64) < 2**14
    assert many or not split or -(-rows // tile_rows) * -(-width // tile_columns) <= linear.COUNTERS


def test_counters_are_zero_after_a_launch() -> None:
    layer = Layer("plain", torch.float32, 130, 1030)
    layer(random_rows(torch.float32, 40, 1030))
    assert linear.pieces(130, 1030, 32) < 33
    assert not linear._counters(torch.device("cpu"), 0).any()


# --- rows are their own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_number_of_poison_harms_its_row_alone(layout: str, configuration: str) -> None:
    layer = Layer(layout, torch.float32, 33, 256)
    x = random_rows(torch.float32, 20, 256)
    with configured(configuration):
        clean = layer(x)
        x[4, 77], x[9, 0], x[14, 255] = float("nan"), float("inf"), float("-inf")
        out = layer(x)
    others = [row for row in range(20) if row not in (4, 9, 14)]
    assert torch.equal(out[others], clean[others])
    poisoned = out[[4]] if layout == "fp8-static" else out[[4, 9, 14]]  # infinities are clamped to 448 steps there
    assert not poisoned.isfinite().any()
    if layout in ("int8", *GROUPS):
        torch.testing.assert_close(out, layer.reference(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_has_the_same_bits_in_every_memory_layout(layout: str, configuration: str) -> None:
    """A row has the same bits in a view: every other row, columns of a wider matrix, or columns that are apart."""
    layer = Layer(layout, torch.float16, 33, 200)
    x = random_rows(torch.float16, 9, layer.depth)
    strided = torch.full((18, layer.depth + 3), float("nan"), dtype=torch.float16)
    strided[::2, 1 : layer.depth + 1] = x
    with configured(configuration):
        assert torch.equal(layer(strided[::2, 1 : layer.depth + 1]), layer(x))
        assert torch.equal(layer(x.T.contiguous().T), layer(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows(layout: str) -> None:
    assert Layer(layout, torch.float32, 40, 64)(torch.empty(0, 128 if layout.endswith("-128") else 64)).shape == (0, 40)


# --- x rounded --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-31, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("layout", ["int8", "int4-32", "int8-32"])
def test_tiny_and_huge_rows(layout: str, size: float) -> None:
    layer = Layer(layout, torch.float32, 40, 64)
    x = torch.randn(3, 64).clamp(-1, 1) * size
    torch.testing.assert_close(layer(x), layer.reference(x), rtol=0, atol=0, equal_nan=True)


def test_ties_go_to_even() -> None:
    """A row whose largest number is 127 is its own integers, so halves lie between two integers."""
    x = torch.cat([torch.tensor([127.0]), torch.arange(-126, 126) + 0.5])[None]
    values, scales = quantize_rows(x)
    assert torch.equal(values.float(), _quantize(x[:, None])[0][:, 0])
    assert torch.equal(scales, torch.ones(1))


def test_every_e4m3_and_what_lies_between_is_rounded_as_the_reference_does() -> None:
    """All finite numbers, halves and their neighbours, numbers past the ends, infinities and NaN round alike."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    halves = (numbers[1:] + numbers[:-1]) / 2
    ends = torch.tensor([448.0, 463.9, 464.0, 465.0, 480.0, 1e30, float("inf"), float("nan"), 2**-12, 1e-40])
    x = torch.cat([numbers, halves, halves * (1 + 2**-20), halves * (1 - 2**-20), ends.double()]).float()
    for scale in (1.0, 0.37, 3.0):
        rows = torch.stack([x, -x]) * scale
        unit = torch.tensor([scale])
        torch.testing.assert_close(round_rows(rows, unit), round_e4m3(rows, unit), rtol=0, atol=0, equal_nan=True)


def test_integer_sums_are_exact_past_what_fp32_holds() -> None:
    weight, scales = pack_int8(torch.full((32, 4099), -128, dtype=torch.int8), torch.ones(32))
    x = torch.ones(2, 4099)
    x[1] = -1
    x[:, 0] = 0.5
    for configuration in CONFIGURATIONS:
        with configured(configuration):
            out = packed_linear(x, weight, scales, NONE, None, None, 32, True)
        assert torch.equal(out, _reference(x, weight, scales, NONE, None, None, 32, True))


def test_int4_adds_its_groups_in_order() -> None:
    """int4's groups are added in order; fp32 rounds their sums so that another order gives other bits."""
    g = torch.Generator().manual_seed(5)
    values = torch.randint(16, (40, 640), generator=g, dtype=torch.uint8)
    scales = torch.rand(40, 20, generator=g) * 2.0 ** torch.randint(-8, 9, (40, 20), generator=g)
    zeros = torch.randint(16, (40, 20), generator=g, dtype=torch.uint8)
    matrix = pack_int4(values, scales, zeros)
    x = torch.randn(37, 640, generator=g)
    wanted = _reference(x, *matrix, None, None, 40, True)
    turned = pack_int4(values.view(40, 20, 32).flip(1).flatten(1), scales.flip(1), zeros.flip(1))
    assert not torch.equal(wanted, _reference(x.view(37, 20, 32).flip(1).flatten(1), *turned, None, None, 40, True))
    assert torch.equal(packed_linear(x, *matrix, None, None, 40, True), wanted)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("plain", {"x": torch.zeros(3, 60)}, "weight is"),
        ("plain", {"x": torch.zeros(3, 64, dtype=torch.float16)}, "weight is"),
        ("plain", {"out_features": 41}, "weight is"),
        ("plain", {"weight": pack_panels(torch.zeros(40, 64))}, "weight is .*panels of floats are the CPU's"),
        ("plain", {"bias": torch.zeros(39)}, "bias is"),
        ("plain", {"bias": torch.zeros(40, dtype=torch.float16)}, "bias is"),
        ("plain", {"x_scale": torch.ones(1)}, "x_scale is"),
        ("int8", {"x": torch.zeros(3, 70)}, "weight is"),
        ("int8", {"scales": torch.zeros(1, 32)}, "scales is"),
        ("int8", {"scales": torch.zeros(2, 32, dtype=torch.float16)}, "scales is"),
        ("fp8", {"x_scale": torch.ones(2)}, "x_scale is"),
        ("int4-32", {"x": torch.zeros(3, 96)}, "weight is"),
        ("int4-32", {"scales": torch.zeros(2, 1, 32, dtype=torch.float16)}, "zeros is"),
        ("int4-32", {"scales": torch.zeros(2, 16, 32, dtype=torch.float16)}, "scales is"),
        ("int4-32", {"zeros": torch.zeros(2, 2, 32)}, "zeros is"),
        ("int8-32", {"x": torch.zeros(3, 96)}, "weight is"),
        ("int8-32", {"scales": torch.zeros(2, 16, 32, dtype=torch.float16)}, "scales is"),
        ("int8-32", {"scales": torch.zeros(2, 2, 32)}, "scales is"),
        ("int8-32", {"zeros": torch.zeros(2, 2, 32, dtype=torch.uint8)}, "zeros is"),
    ],
)
def test_arguments_that_do_not_fit_are_named(layout: str, change: dict[str, object], message: str) -> None:
    layer = Layer(layout, torch.float32, 39 if layout == "int4-32" else 40, 64)  # odd: with zeros
    names = ("x", "weight", "scales", "zeros", "bias", "x_scale", "out_features", "float_out")
    arguments = dict(zip(names, (torch.zeros(3, 64), *layer.arguments(None, False)), strict=True)) | change
    with pytest.raises(ValueError, match=f"packed_linear: .*{message}"):
        packed_linear(**arguments)  # type: ignore[arg-type]


# --- packed_embedding -------------------------------------------------------------------------------------------------

embedded = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, *LAYOUTS])


@settings(max_examples=50, deadline=None)
@given(layout=embedded, width=st.integers(1, 100), depth=st.integers(1, 300) | st.just(1500), count=st.integers(0, 9))
def test_rows_of_a_matrix_are_the_references(layout: str | torch.dtype, width: int, depth: int, count: int) -> None:
    if isinstance(layout, torch.dtype):
        depth, matrix = depth, (pack_panels(torch.randn(width, depth).to(layout)), NONE, NONE)
    else:
        layer = Layer(layout, torch.float16, width, depth)
        depth, matrix = layer.depth, (layer.weight, layer.scales, layer.zeros)
    ids = torch.randint(width, (count,))
    rows, wanted = packed_embedding(ids, *matrix, depth), packed_rows(ids, *matrix, depth)
    assert rows.dtype == wanted.dtype
    assert torch.equal(rows, wanted)


def test_ids_past_the_matrix_give_its_ends() -> None:
    weight = torch.randn(10, 6)
    assert torch.equal(packed_embedding(torch.tensor([-1, 10, 2**40]), weight, NONE, NONE, 6), weight[[0, 9, 9]])
    assert torch.equal(packed_embedding(torch.tensor([-1, 32]), pack_panels(weight), NONE, NONE, 6)[0], weight[0])


# --- the compiled instructions ----------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [90, *(pytest.param(one, marks=pytest.mark.long) for one in (80, 100, 120))])
def test_the_same_instruction_multiplies_everywhere(architecture: int) -> None:
    """Each matrix has one instruction and one kWidth in all configurations.

    Both fix the order of additions, and so a row's bits; kWidth: the inputs that an instruction takes together.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("triton_linear_instructions.py")
    command = [sys.executable, script, str(architecture)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = json.loads(done.stdout)
    assert {name.split()[1] for name in compiled} == {f"sm_{architecture}"}
    for layout in ("bf16", "fp32", "fp8"):
        mine = {name: of for name, of in compiled.items() if name.startswith(f"{layout} ")}
        assert len(mine) == (3 if layout == "fp32" else 6)
        assert len({json.dumps(of) for of in mine.values()}) == 1, mine
        product = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        assert next(iter(mine.values()))["instructions"] == ([] if layout == "fp32" else [product])
