"""Packed matrices and rows of every layout, for the tests of packed_linear."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from trtspec.ops import packed_linear
from trtspec.ops.linear import _reference
from trtspec.ops.packing import pack_fp8, pack_int4, pack_int8, pack_panels, quantize_int4, quantize_int8, unpack

EPSILON = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # error of one rounding
GROUPS = {f"{kind}-{size}": size for kind in ("int4", "int8") for size in (32, 64, 128)}
FP8 = ("fp8", "fp8-static")  # x unchanged, and x rounded to e4m3
NONE = torch.empty(0)

dtypes = st.sampled_from(list(EPSILON))
layouts = st.sampled_from(["panels", "int8", *GROUPS, *FP8])
# Depths and widths around the edges of words, vectors, slices (64 or 128 steps) and panels.
depths = st.sampled_from([1, 2, 3, 16, 31, 127, 128, 256, 510, 512, 514, 1000, 1025, 2049]) | st.integers(1, 300)
widths = st.sampled_from([1, 15, 16, 17, 31, 32, 33, 64, 130, 512]) | st.integers(1, 100)
row_counts = st.integers(1, 40) | st.sampled_from([95, 96, 97, 200])


@dataclass(frozen=True)
class Layer:
    """A packed matrix [N, K]."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor
    out_features: int
    in_features: int
    x_scale: Tensor | None = None

    def __call__(self, x: Tensor, bias: Tensor | None = None, float_out: bool = False) -> Tensor:
        return packed_linear(
            x,
            self.weight,
            bias,
            scales=self.scales,
            zeros=self.zeros,
            x_scale=self.x_scale,
            out_features=self.out_features,
            float_out=float_out,
        )

    def reference(self, x: Tensor, bias: Tensor | None = None, float_out: bool = False) -> Tensor:
        return _reference(x, self.weight, self.scales, self.zeros, bias, self.x_scale, self.out_features, float_out)

    def dense(self) -> Tensor:
        """The matrix that the layer stands for, [N, K] fp64."""
        return unpack(self.weight, self.scales, self.zeros, self.out_features, self.in_features).double()


def random_layer(layout: str, dtype: torch.dtype, width: int, depth: int) -> Layer:
    """Return a random layer; the depth is rounded up to whole groups."""
    generator = torch.Generator().manual_seed(1000 * width + depth)
    if layout in GROUPS:
        depth += -depth % GROUPS[layout]
    weight = torch.randn(width, depth, generator=generator).to(dtype)
    if layout == "panels":
        return Layer(pack_panels(weight), NONE, NONE, width, depth)
    if layout == "int8":
        return Layer(*quantize_int8(weight), NONE, width, depth)
    if layout in FP8:
        x_scale = torch.tensor([0.37]) if layout == "fp8-static" else None
        return Layer(*pack_fp8(any_fp8(width, depth), weight[:, 0].abs() / 64), NONE, width, depth, x_scale)
    if layout.startswith("int8-"):
        return Layer(*random_int8_groups(width, depth, GROUPS[layout]), width, depth)
    if width % 2:  # half of the layers have no zeros
        return Layer(*quantize_int4(weight, GROUPS[layout]), width, depth)
    values = torch.randint(16, (width, depth), generator=generator, dtype=torch.uint8)
    scales = torch.rand(width, depth // GROUPS[layout], generator=generator)
    return Layer(*pack_int4(values, scales, None), width, depth)


def random_int8_groups(width: int, depth: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers of the whole int8 range, and scales of either sign: panels, scales, no zeros."""
    generator = torch.Generator().manual_seed(1000 * width + depth)
    values = torch.randint(-128, 128, (width, depth), generator=generator, dtype=torch.int8)
    return *pack_int8(values, torch.randn(width, depth // size, generator=generator) / 16), NONE


def any_fp8(*shape: int) -> Tensor:
    """Return e4m3 numbers of this shape; all finite numbers are equally frequent."""
    octets = torch.randint(127, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.uint8)
    return (octets | octets.flip(-1) << 7).view(torch.float8_e4m3fn)


def random_rows(dtype: torch.dtype, rows: int, depth: int) -> Tensor:
    """Return rows of very different sizes, one of which is zero."""
    generator = torch.Generator().manual_seed(rows + depth)
    x = torch.randn(rows, depth, generator=generator) * 10.0 ** torch.randint(-2, 3, (rows, 1), generator=generator)
    x[rows // 2] *= rows < 2
    return x.to(dtype)
