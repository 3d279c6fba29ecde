"""Single kernels on the GPU: linears in every format, and attention, over more layers than the L2 cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.card import Card, seconds
from benchmarks.gpu.checkpoints import ITEM_BYTES
from benchmarks.peers.checkpoints import Shape
from benchmarks.steps.results import Figure
from trtspec.ops import packed_linear, spec_attention_
from trtspec.ops.packing import pack_fp8, pack_int8, quantize_int4, quantize_int8

LEAST_BYTES = 2**28  # read by each pass: several times the L2 cache
MOST_LAYERS = 64
ROWS = (1, 4, 16, 64, 256, 2048)
FEW_ROWS = 64  # up to this number of rows, reading the weights takes the time
GROUP = 128
BLOCK = 32  # tokens of a KV block
GENERATIONS = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (64, 1024))  # requests, tokens of each
DRAFTED = 4  # rows of a request that verifies three drafts
PROMPTS = (512, 2048, 8192)
_REPEATS = 5  # of a pass, in each turn
_WARM_UPS = 2

Pass = Callable[[], object]


def time_in_turns(card: Card, passes: Sequence[Pass], turns: int) -> list[list[float]]:
    """Seconds of each pass, a value a turn: the median of a few replays, as one launch where the device can."""
    replays = [card.capture(one) for one in passes]
    times: list[list[float]] = [[] for _ in passes]
    for _ in range(turns):
        for replay, values in zip(replays, times, strict=True):
            stamps = []
            for _ in range(_WARM_UPS + _REPEATS):
                first, last = card.stamp(), card.stamp()
                first.record()
                replay()
                last.record()
                stamps.append((first, last))
            card.synchronize()
            values.append(sorted(seconds(stamps[_WARM_UPS:]))[_REPEATS // 2])
    return times


# -- linears -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """A matrix [N, K] in a format, with what packed_linear wants of it."""

    weight: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    out_features: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weight, self.scales, self.zeros) if tensor is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        return packed_linear(x, self.weight, scales=self.scales, zeros=self.zeros, out_features=self.out_features)


def bf16(weight: Tensor) -> Linear:
    return Linear(weight, None, None, len(weight))


def fp8(weight: Tensor) -> Linear:
    return Linear(*pack_fp8(weight.to(torch.float8_e4m3fn), weight[:, 0].abs().float()), None, len(weight))


def int8(weight: Tensor) -> Linear:
    return Linear(*quantize_int8(weight), None, len(weight))


def int8_groups(weight: Tensor) -> Linear:
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 127
    values = (groups / scales[..., None].clamp(min=1e-20)).round().to(torch.int8).flatten(1)
    return Linear(*pack_int8(values, scales), None, len(weight))


def int4_groups(weight: Tensor) -> Linear:
    return Linear(*quantize_int4(weight, GROUP), len(weight))


FORMATS: dict[str, Callable[[Tensor], Linear]] = {
    "bf16": bf16,
    "fp8": fp8,
    "int8": int8,
    f"int8 g={GROUP}": int8_groups,
    f"int4 g={GROUP}": int4_groups,
}


def layer_sizes(shape: Shape) -> list[tuple[int, int]]:
    """(N, K) of the four linears of a layer."""
    heads = shape.heads * shape.head_dim
    qkv, gate_up = heads + 2 * shape.kv_heads * shape.head_dim, 2 * shape.intermediate
    return [(qkv, shape.hidden), (shape.hidden, heads), (gate_up, shape.hidden), (shape.hidden, shape.intermediate)]


def measure_linears(
    card: Card, shape: Shape, bandwidth: float, turns: int, report: Callable[[str], None]
) -> list[Figure]:
    """All linears of some layers: bytes of weights a second over the copy's, and torch's time in bf16 over ours."""
    g = torch.Generator(card.device).manual_seed(0)
    figures = []
    sizes = layer_sizes(shape)
    for name, pack in FORMATS.items():
        dense: list[Tensor] = []
        packed: list[Linear] = []
        while sum(one.nbytes for one in packed) < LEAST_BYTES:
            layer = [torch.randn(*size, generator=g, device=card.device, dtype=torch.bfloat16) for size in sizes]
            dense += layer
            packed += map(pack, layer)
        for rows in ROWS:
            x = {k: torch.randn(rows, k, generator=g, device=card.device, dtype=torch.bfloat16) for _, k in sizes}
            ours, theirs = (
                partial(_each, calls)
                for calls in (
                    [partial(one, x[weight.shape[1]]) for one, weight in zip(packed, dense, strict=True)],
                    [partial(F.linear, x[weight.shape[1]], weight) for weight in dense],
                )
            )
            own, other = time_in_turns(card, [ours, theirs], turns)
            case = f"{name}, {rows} row{'s' * (rows > 1)}"
            if rows <= FEW_ROWS:
                nbytes = sum(one.nbytes for one in packed)
                figures.append(Figure(f"{case}: of copy bandwidth", [nbytes / t / bandwidth for t in own], "share"))
            ratio = [b / a for a, b in zip(own, other, strict=True)]
            figures.append(Figure(f"{case}: torch's bf16 time / ours", ratio, "x"))
            report(" | ".join(figures[-1].cells()))
    return figures


def _each(calls: Sequence[Pass]) -> None:
    for call in calls:
        call()


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_calls(card: Card, shape: Shape, requests: int, tokens: int, rows: int, layers: int) -> list[Pass]:
    """A call for each layer, over a cache whose blocks are in any order. The last `rows` tokens are new."""
    blocks = -(-tokens // BLOCK)
    g = torch.Generator(card.device).manual_seed(tokens)
    draw = partial(torch.randn, generator=g, device=card.device, dtype=torch.bfloat16)
    integers = partial(torch.tensor, dtype=torch.int32, device=card.device)
    order = 1 + torch.randperm(requests * blocks, generator=g, device=card.device).to(torch.int32)
    metadata = (
        integers([n * rows for n in range(requests + 1)]),
        integers([tokens] * requests),
        order.view(requests, blocks),
        integers([]),
        torch.empty(0, device=card.device),
    )
    calls: list[Pass] = []
    for _ in range(layers):
        caches = [draw(1 + requests * blocks, BLOCK, shape.kv_heads, shape.head_dim) for _ in range(2)]
        new = [draw(requests * rows, n, shape.head_dim) for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        calls.append(partial(spec_attention_, *new, *caches, *metadata, shape.head_dim**-0.5))
    return calls


def torch_calls(card: Card, shape: Shape, requests: int, tokens: int, rows: int, layers: int) -> list[Pass]:
    """Torch's attention of a call for each layer: of one row, or of whole prompts. K and V lie together."""
    g = torch.Generator(card.device).manual_seed(tokens)
    draw = partial(torch.randn, generator=g, device=card.device, dtype=torch.bfloat16)
    calls: list[Pass] = []
    for _ in range(layers):
        q = draw(requests, shape.heads, rows, shape.head_dim)
        k, v = (draw(requests, shape.kv_heads, tokens, shape.head_dim) for _ in range(2))
        calls.append(partial(F.scaled_dot_product_attention, q, k, v, is_causal=rows > 1, enable_gqa=True))
    return calls


def measure_attention(
    card: Card, shape: Shape, bandwidth: float, turns: int, report: Callable[[str], None]
) -> list[Figure]:
    """Generations: bytes of KV a second over the copy's, four rows over one, torch's time over ours; so of prompts."""
    figures = []
    for requests, tokens in GENERATIONS:
        nbytes = 2 * ITEM_BYTES * shape.kv_heads * shape.head_dim * requests * tokens
        layers = max(1, min(MOST_LAYERS, round(LEAST_BYTES / nbytes)))
        passes = [
            partial(_each, attention_calls(card, shape, requests, tokens, 1, layers)),
            partial(_each, attention_calls(card, shape, requests, tokens, DRAFTED, layers)),
            partial(_each, torch_calls(card, shape, requests, tokens, 1, layers)),
        ]
        one, drafted, other = time_in_turns(card, passes, turns)
        case = f"{requests} x {tokens} tokens"
        figures += [
            Figure(f"{case}, 1 row: of copy bandwidth", [layers * nbytes / t / bandwidth for t in one], "share"),
            Figure(f"{case}: {DRAFTED} rows / 1 row", [b / a for a, b in zip(one, drafted, strict=True)], "x"),
            Figure(f"{case}, 1 row: torch's time / ours", [b / a for a, b in zip(one, other, strict=True)], "x"),
        ]
        for figure in figures[-3:]:
            report(" | ".join(figure.cells()))
    for tokens in PROMPTS:
        passes = [partial(_each, calls(card, shape, 1, tokens, tokens, 4)) for calls in (attention_calls, torch_calls)]
        own, other = time_in_turns(card, passes, turns)
        ratio = [b / a for a, b in zip(own, other, strict=True)]
        figures.append(Figure(f"a prompt of {tokens}: torch's time / ours", ratio, "x"))
        report(" | ".join(figures[-1].cells()))
    return figures
