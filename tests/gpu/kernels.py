"""Checks of each op on a device against its pure-torch reference on the CPU; test_kernels.py calls them for a GPU.

Bitwise equal are acceptance, compaction, draws, int8 and int4 products, rows of matrices, and logits that no filter
decides about. Attention and the other products are equal within rounding, as they add in an order of their own; each
check has the bound. So are tokens at the edge of top-p or min-p. The bounds are of sums of roundings, not statistics,
and raise no false alarms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import trtspec.ops.accept as accept
import trtspec.ops.attention as attention
import trtspec.ops.compact as compact
import trtspec.ops.linear as linear
import trtspec.ops.logits as logits
import trtspec.ops.sample as sample
from tests.unit.attention_cases import Batch, Model, Part, pack_bits
from trtspec.ops.packing import pack_fp8, pack_int4, pack_int8, packed_rows, quantize_int4, quantize_int8, unpack

OPS = (
    "spec_attention_",
    "process_logits",
    "spec_sample",
    "spec_accept",
    "kv_compact_",
    "packed_linear",
    "packed_embedding",
    "rms_norm",
    "silu_mul",
    "rotate_heads",
)
"""Ops that have a kernel of our own on a GPU."""

INF = float("inf")
NONE = torch.empty(0)
NO_IDS = torch.empty(0, dtype=torch.int64)
Arguments = dict[str, Tensor]


def on(device: torch.device, value: Any) -> Any:
    """A copy of a tensor on the device; any other value as it is."""
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def call(op: str, device: torch.device, *arguments: Any) -> Any:
    """Call torch.ops.trtspec.<op> with copies on the device, and return its results on the CPU."""
    results = getattr(torch.ops.trtspec, op)(*(on(device, argument) for argument in arguments))
    return results.cpu() if isinstance(results, Tensor) else tuple(result.cpu() for result in results)


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal bit for bit: NaN equals itself, and zeros of different sign differ."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return left.dtype == right.dtype and torch.equal(left.view(integers), right.view(integers))


# -- attention ---------------------------------------------------------------------------------------------------------

ATTENTION_BOUND = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2.4e-2}
"""Relative and absolute bounds for values of order 1.

fp32: sums of a few hundred products, and exponentials of 2 ulps. Halves: weights and results are rounded to 11 or 8
bits. These are two roundings by 2^-12 or 2^-9 of up to four, and the bound has room for a third.
"""

# One of each shape that kernels are compiled for: heads in groups of 1 to 8, head sizes that are no power of two.
ATTENTION_MODELS = (
    Model(heads=2, kv_heads=2, head_dim=64, dtype=torch.float32),
    Model(heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16),
    Model(heads=8, kv_heads=1, head_dim=128, dtype=torch.bfloat16, window=40),
    Model(heads=6, kv_heads=2, head_dim=80, dtype=torch.float16, softcap=20.0),
    Model(heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, sinks=True, window=17, softcap=5.0),
    Model(heads=7, kv_heads=1, head_dim=20, dtype=torch.float32, block_size=5, sinks=True),
)


@st.composite
def ragged(draw: st.DrawFn, longest: int = 300) -> list[Part]:
    """1 to 4 requests with new rows like those of generations, drafts and prompts."""
    committed = st.sampled_from([0, 1, 63, 64, 127, 128, 255, 256, 257]) | st.integers(0, longest)
    rows = st.sampled_from([1, 4, 8]) | st.integers(1, 40)
    parts = draw(st.lists(st.builds(Part, st.integers(0, 2), committed, rows), min_size=1, max_size=4))
    return [replace(part, start=min(part.start, longest - part.num_rows)) for part in parts]


def trees(parts: list[Part], seed: int) -> Tensor:
    """A packed mask [T, W] of trees: each row sees itself, a random earlier row, and the rows that this one sees."""
    g, rows = torch.Generator().manual_seed(seed), []
    words = max(-(-part.num_rows // 32) for part in parts)
    for part in parts:
        seen: list[list[bool]] = []
        for node in range(part.num_rows):
            parent = int(torch.randint(-1, node, (), generator=g)) if node else -1
            above = seen[parent] if parent >= 0 else [False] * part.num_rows
            seen.append([flag or other == node for other, flag in enumerate(above)])
        rows += seen
    return torch.cat([pack_bits([row], words) for row in rows])


def place(batch: Batch, device: torch.device) -> Batch:
    """A copy of a batch on the device."""
    return replace(batch, **{f.name: on(device, getattr(batch, f.name)) for f in fields(batch) if f.init})


def check_attention(batch: Batch, device: torch.device) -> None:
    """Check the output within ATTENTION_BOUND, with the reference's NaNs, and caches bit for bit, except scratch."""
    wanted, mine = place(batch, torch.device("cpu")), place(batch, device)
    expected = attention._reference_(*wanted.tensors, *wanted.settings)
    got, bound = mine.run().cpu(), ATTENTION_BOUND[batch.q.dtype]
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound, equal_nan=True)
    assert same(mine.k_cache.cpu()[1:], wanted.k_cache[1:])
    assert same(mine.v_cache.cpu()[1:], wanted.v_cache[1:])


# -- logits and draws --------------------------------------------------------------------------------------------------

FILTERS = ("ban_ids", "ban_until", "allow_mask", "temperatures", "top_ks", "top_ps", "min_ps")
EDITS = ("history", "prompt_lens", "penalties", "bias_ids", "bias_values")
LOGITS = ("logits", "positions", *EDITS, *FILTERS)
"""Arguments of the op, in order."""

_DTYPES = {"bias_values": torch.float32, "penalties": torch.float32, "positions": torch.int64, "ban_until": torch.int64}
EDGE = 1e-5
"""Largest error of p by which top-p or min-p may decide differently: p sums up to 2^17 probabilities in fp32."""


def complete(given: Mapping[str, Tensor]) -> Arguments:
    """All arguments of process_logits in order; those that are not given have size zero."""
    floats = ("temperatures", "top_ps", "min_ps")
    blank = {
        name: torch.empty(0, dtype=torch.float32 if name in floats else _DTYPES.get(name, torch.int32))
        for name in LOGITS
    }
    rows = given["logits"].shape[0]
    blank["positions"] = torch.zeros(rows, dtype=torch.int64)
    for name in ("ban_ids", "ban_until", "allow_mask"):
        blank[name] = blank[name].view(rows, 0)
    return {name: given.get(name, blank[name]) for name in LOGITS}


def check_logits(given: Mapping[str, Tensor], device: torch.device) -> None:
    """Check which logits the kernel keeps, and that they have the reference's bits.

    The kernel must keep what the reference keeps with slightly stricter top-p and min-p. It must remove what the
    reference removes with slightly looser ones.
    """
    arguments = complete(given)

    def nudged(nudge: float) -> Tensor:
        changed = dict(arguments)
        for name, off, change in (("top_ps", 1.0, nudge), ("min_ps", 0.0, -nudge)):
            changed[name] = torch.where(changed[name] == off, off, changed[name] + change)
        return logits._reference(**changed)

    got, fewer, more = call("process_logits", device, *arguments.values()), nudged(-EDGE), nudged(EDGE)
    assert ((got != -INF) | (fewer == -INF)).all()
    assert ((got == -INF) | (got == more) | (got.isnan() & more.isnan())).all()


@st.composite
def vocabularies(draw: st.DrawFn) -> Arguments:
    """1 to 4 rows like those of models: peaked or flat, with ties, of a vocabulary that is spread over programs."""
    rows, vocab = draw(st.integers(1, 4)), draw(st.sampled_from([4096, 4097, 32000, 128256]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, vocab, generator=g) * draw(st.sampled_from([0.1, 1.0, 3.0]))
    if draw(st.booleans()):
        x = (x * 8).round() / 8
    given = {"logits": x, "positions": torch.randint(0, 9, (rows,), generator=g)}

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor([draw(st.sampled_from(values)) for _ in range(rows)]).to(dtype)

    if draw(st.booleans()):
        given["temperatures"] = column([0.0, 0.7, 1.0, 1.3], torch.float32)
    if draw(st.booleans()):
        given["top_ks"] = column([0, 1, 50, 5000], torch.int32)
    if draw(st.booleans()):
        given["top_ps"] = column([0.1, 0.9, 0.999, 1.0], torch.float32)
    if draw(st.booleans()):
        given["min_ps"] = column([0.0, 0.01, 0.5], torch.float32)
    if draw(st.booleans()):
        given["ban_ids"] = x.argmax(1, keepdim=True).to(torch.int32)
        given["ban_until"] = torch.randint(0, 9, (rows, 1), generator=g)
    if draw(st.booleans()):
        given["allow_mask"] = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=g).to(torch.int32)
    if draw(st.booleans()):
        given["history"] = torch.randint(-1, vocab, (rows, 30), generator=g, dtype=torch.int32)
        given["prompt_lens"] = torch.randint(0, 30, (rows,), generator=g, dtype=torch.int32)
        given["penalties"] = torch.rand(rows, 3, generator=g) + 0.5
        given["bias_ids"] = torch.stack([torch.randperm(vocab, generator=g)[:3] for _ in range(rows)]).to(torch.int32)
        given["bias_values"] = torch.randn(rows, 3, generator=g)
    return given


@st.composite
def draws(draw: st.DrawFn) -> Arguments:
    """Rows of several programs: flat, tied, peaked, all removed except a few, with NaN, or with nothing left."""
    rows, vocab = draw(st.integers(1, 4)), draw(st.sampled_from([4097, 32000, 128256]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, vocab, generator=g)
    for row in range(rows):
        match draw(st.sampled_from(["flat", "tied", "normal", "few", "broken", "none"])):
            case "flat":
                x[row] = 0
            case "tied":
                x[row] = x[row].clamp(max=1.0)
            case "few":
                x[row, torch.rand(vocab, generator=g) < 0.999] = -INF
            case "broken":
                x[row, draw(st.integers(0, vocab - 1))] = float("nan")
            case "none":
                x[row] = -INF
    return {
        "logits": x,
        "greedy": torch.rand(rows, generator=g) < 0.3,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        "positions": torch.randint(0, 2**40, (rows,), generator=g),
        "vocab_ids": torch.randperm(3 * vocab, generator=g)[:vocab] if draw(st.booleans()) else NO_IDS,
    }


def check_sample(arguments: Arguments, device: torch.device) -> None:
    """Check that the ids are the reference's."""
    arguments = {"vocab_ids": NO_IDS, **arguments}
    ordered = [arguments[name] for name in ("logits", "greedy", "seeds", "positions", "vocab_ids")]
    assert torch.equal(call("spec_sample", device, *ordered), sample._reference(*ordered))


def check_noise(rows: int, vocab: int, own_ids: bool, device: torch.device) -> None:
    """Check that the kernel's noise has the reference's bits, and that the reference has the same bits on the device.

    Logits cancel the noise of each token, except for one token, whose logit is an ulp larger. So any other bit of the
    noise gives another draw.
    """
    g = torch.Generator().manual_seed(rows)
    ids = torch.randperm(3 * vocab, generator=g)[:vocab] if own_ids else torch.arange(vocab)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions = torch.randint(0, 2**40, (rows,), generator=g)
    noise = sample.gumbel_noise(seeds, positions, ids)
    there = sample.gumbel_noise(*(on(device, tensor) for tensor in (seeds, positions, ids)))
    assert same(there.cpu(), noise)
    column, row = torch.randint(0, vocab, (rows,), generator=g), torch.arange(rows)
    x = -noise
    x[row, column] = x[row, column].nextafter(torch.tensor(INF))
    drawn = call("spec_sample", device, x, row < 0, seeds, positions, ids if own_ids else NO_IDS)
    assert torch.equal(drawn, ids[column])


# -- acceptance and compaction -----------------------------------------------------------------------------------------


def check_accept(arguments: Arguments, device: torch.device) -> None:
    ordered = [arguments[n] for n in ("sampled", "draft_tokens", "draft_lens", "forced_accept", "emits")]
    for got, wanted in zip(call("spec_accept", device, *ordered), accept._reference(*ordered), strict=True):
        assert torch.equal(got, wanted)


def check_compact(arguments: Arguments, device: torch.device) -> None:
    """Check everything except scratch block 0, in which the reference writes padding."""
    ordered = [arguments[name] for name in ("k_cache", "v_cache", "block_tables", "starts", "path")]
    mine = [on(device, tensor) for tensor in ordered]
    torch.ops.trtspec.kv_compact_(*mine)
    for got, wanted in zip(mine[:2], compact._reference(*ordered), strict=True):
        assert same(got.cpu()[1:], wanted[1:])


# -- linears -----------------------------------------------------------------------------------------------------------

GROUPS = {f"{kind}-{size}": size for kind in ("int4", "int8") for size in (32, 64, 128)}
FP8 = ("fp8", "fp8-static")  # x as it is, and rounded to e4m3
LAYOUTS = ("plain", "int8", *GROUPS, *FP8)
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Largest relative rounding error of one result."""


@dataclass(frozen=True)
class Layer:
    """A matrix [N, K] in one of the layouts, on the device where it was made."""

    layout: str
    weight: Tensor
    scales: Tensor
    zeros: Tensor
    x_scale: Tensor | None
    width: int  # N
    depth: int  # K

    @classmethod
    def random(
        cls, layout: str, dtype: torch.dtype, width: int, depth: int, device: torch.device | None = None
    ) -> Layer:
        """Return a random matrix. K is rounded up, so that groups are whole."""
        depth += -depth % GROUPS.get(layout, 1)
        device = device or torch.device("cpu")
        g = torch.Generator(device).manual_seed(1000 * width + depth)
        weight = torch.randn(width, depth, generator=g, device=device).to(dtype)
        none = weight.new_empty(0, dtype=torch.float32)
        x_scale = torch.full((1,), 0.37, device=device) if layout == "fp8-static" else None
        if layout == "plain":
            return cls(layout, weight, none, none, None, width, depth)
        if layout == "int8":
            return cls(layout, *quantize_int8(weight), none, None, width, depth)
        if layout in FP8:
            octets = torch.randint(127, (width, depth), generator=g, dtype=torch.uint8, device=device)
            values = (octets | octets.flip(-1) << 7).view(torch.float8_e4m3fn)  # all finite numbers
            return cls(layout, *pack_fp8(values, weight[:, 0].abs() / 64), none, x_scale, width, depth)
        if layout.startswith("int8-"):
            integers = torch.randint(-128, 128, (width, depth), generator=g, dtype=torch.int8, device=device)
            scales = torch.randn(width, depth // GROUPS[layout], generator=g, device=device) / 16
            return cls(layout, *pack_int8(integers, scales), none, None, width, depth)
        if width % 2:
            return cls(layout, *quantize_int4(weight, GROUPS[layout]), None, width, depth)  # with zero points
        values = torch.randint(16, (width, depth), generator=g, dtype=torch.uint8, device=device)
        scales = torch.rand(width, depth // GROUPS[layout], generator=g, device=device)
        return cls(layout, *pack_int4(values, scales, None), None, width, depth)  # no zero points

    def arguments(self, bias: Tensor | None, float_out: bool) -> tuple[Any, ...]:
        """Arguments of the op after x."""
        return self.weight, self.scales, self.zeros, bias, self.x_scale, self.width, float_out

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N], on the device of the matrix."""
        result: Tensor = torch.ops.trtspec.packed_linear(x, *self.arguments(None, False))
        return result


def random_rows(dtype: torch.dtype, rows: int, depth: int) -> Tensor:
    """A tensor [rows, depth] with rows of very different magnitude; one of several rows is zero."""
    g = torch.Generator().manual_seed(rows + depth)
    x = torch.randn(rows, depth, generator=g) * 10.0 ** torch.randint(-2, 3, (rows, 1), generator=g)
    x[rows // 2] *= rows < 2
    return x.to(dtype)


def check_linear(layer: Layer, x: Tensor, bias: Tensor | None, float_out: bool, device: torch.device) -> None:
    """Check a product: bit for bit against the reference for integers, else within a bound of the float64 result.

    The bound has half a unit of fp32, of the sum of all magnitudes, for each of 2 K + 16 roundings (products,
    additions, scales, bias). To this it adds one rounding to the result's dtype.
    """
    arguments = layer.arguments(bias, float_out)
    got = call("packed_linear", device, x, *arguments)
    assert got.dtype == (torch.float32 if float_out else x.dtype)
    if layer.layout in ("int8", *GROUPS):
        assert torch.equal(got, linear._reference(x, *arguments))
        return
    scale = layer.x_scale
    read = x.double() if scale is None else linear.round_e4m3(x, scale).double() * scale.double()
    dense = unpack(layer.weight, layer.scales, layer.zeros, layer.width, layer.depth).double()
    exact, terms = read @ dense.T, read.abs() @ dense.abs().T
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    bound = (2 * layer.depth + 16) * 2**-24 * terms + ROUNDING[got.dtype] * exact.abs() + 1e-7
    assert ((got.double() - exact).abs() <= bound).all()


def check_embedding(layer: Layer, ids: Tensor, device: torch.device) -> None:
    """Check that the rows have the reference's bits."""
    matrix = (layer.weight, layer.scales, layer.zeros)
    got, wanted = call("packed_embedding", device, ids, *matrix, layer.depth), packed_rows(ids, *matrix, layer.depth)
    assert got.dtype == wanted.dtype
    assert torch.equal(got, wanted)
