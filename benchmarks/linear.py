"""packed_linear against the machine's limits: all linears of a model, for 1 to 1024 rows.

Before each number of rows a round reads a large buffer; after it, the round multiplies in registers for as long. These
are the probes, and all of them meet the same machine. The best of all rounds counts, as other programs only make it
slower.

- of memory: bandwidth at which weights were read, as a share of the probe's.
- x 1 row: time over that of one row.
- arithmetic: time in which the probe does as many multiplications by the same instructions (groups are scaled, too).
- of limit: time over the longer of one row's time and the arithmetic's at 80 %. No such kernel gets far below that.

The last table is one prefill-sized product against torch's.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.kv.memory import huge_pages
from trtspec.ops import load_plugins, packed_linear
from trtspec.ops.packing import pack_fp8, pack_int4, pack_int8, pack_panels, quantize_int8


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: features, and layers."""

    hidden: int
    intermediate: int
    qkv: int
    vocab: int
    layers: int

    def shapes(self) -> list[tuple[int, int]]:
        """Return (N, K) of all linears of a step, in order."""
        attention = [(self.qkv, self.hidden), (self.hidden, self.hidden)]
        mlp = [(2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)]
        return [*(attention + mlp) * self.layers, (self.vocab, self.hidden)]


MODELS = {
    "1024": Sizes(1024, 2816, (16 + 2 * 4) * 64, 32000, 16),
    "smollm2": Sizes(576, 1536, (9 + 2 * 3) * 64, 49152, 30),
}
ALIGNMENT = 64  # bytes
FORMATS = ("bf16", "fp8", "int8", "int8 g=32", "int4 g=32", "int4 g=128")


@dataclass(frozen=True)
class Layer:
    """A packed linear."""

    out_features: int
    in_features: int
    weight: Tensor
    scales: Tensor
    zeros: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes + self.zeros.nbytes


def random_layer(name: str, out_features: int, in_features: int) -> Layer:
    none = torch.empty(0)
    groups = in_features // int(name.partition("=")[2] or in_features)
    if name.startswith("int8 "):
        values = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
        return Layer(out_features, in_features, *pack_int8(values, torch.rand(out_features, groups)), none)
    if name.startswith("int4"):
        values = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
        zeros = torch.randint(0, 16, (out_features, groups), dtype=torch.uint8)
        return Layer(out_features, in_features, *pack_int4(values, torch.rand(out_features, groups), zeros))
    weight = torch.randn(out_features, in_features, dtype=torch.bfloat16)
    if name == "fp8":
        return Layer(out_features, in_features, *pack_fp8(weight.to(torch.float8_e4m3fn), weight[:, 0].abs()), none)
    if name == "int8":
        return Layer(out_features, in_features, *quantize_int8(weight), none)
    return Layer(out_features, in_features, pack_panels(weight), none, none)


def in_huge_pages(layers: list[Layer]) -> list[Layer]:
    """Move the layers into one memory block, as engines hold their weights."""
    arena, end, moved = huge_pages(sum(layer.nbytes for layer in layers) + len(layers) * 3 * ALIGNMENT), 0, []
    for layer in layers:
        parts = []
        for tensor in (layer.weight, layer.scales, layer.zeros):
            there = tensor
            if tensor.numel():
                flat = torch.frombuffer(arena, dtype=tensor.dtype, count=tensor.numel(), offset=end)
                there = flat.view(tensor.shape).copy_(tensor)
                end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            parts.append(there)
        moved.append(Layer(layer.out_features, layer.in_features, *parts))
    return moved


def run(layers: list[Layer], x: dict[int, Tensor]) -> None:
    op = torch.ops.trtspec.packed_linear.default
    for layer in layers:
        op(x[layer.in_features], layer.weight, layer.scales, layer.zeros, None, None, layer.out_features, False)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def sustained(probe: Callable[[], float], duration: float) -> float:
    """Average rate that `probe` returns over `duration` seconds; in an instant it may return more."""
    work = spent = 0.0
    while spent < duration:
        begin = time.perf_counter()
        rate = probe()
        took = time.perf_counter() - begin
        work, spent = work + rate * took, spent + took
    return work / spent


def bandwidth_table(sizes: Sizes, formats: list[str], row_counts: list[int], rounds: int) -> None:
    probe = torch.frombuffer(huge_pages(400_000_000), dtype=torch.int32).fill_(1)
    probes = torch.ops.trtspec_probe
    print("| weights | rows | ms | GB/s | of memory | x 1 row | arithmetic, ms | of limit |")
    print("|---|---|---|---|---|---|---|---|")
    for name in formats:
        layers = in_huge_pages([random_layer(name, *shape) for shape in sizes.shapes()])
        nbytes = sum(layer.nbytes for layer in layers)
        group_size = int(name.partition("=")[2] or sizes.hidden)
        products = sum(layer.out_features * layer.in_features for layer in layers)
        inputs = {
            rows: {depth: torch.randn(rows, depth).bfloat16() for depth in (sizes.hidden, sizes.intermediate)}
            for rows in row_counts
        }
        best, rates, memory = dict.fromkeys(row_counts, math.inf), dict.fromkeys(row_counts, 0.0), 0.0
        multiply = partial(probes.multiply_rate, layers[0].weight, group_size)
        for round_ in range(rounds):
            for rows in row_counts:
                if rows > 100 and round_ > 2:
                    continue
                memory = max(memory, probes.read_bandwidth(probe))
                took = seconds(partial(run, layers, inputs[rows]))
                best[rows], rates[rows] = min(best[rows], took), max(rates[rows], sustained(multiply, took))
        one = best[row_counts[0]]
        for rows, took in best.items():
            arithmetic = rows * products / rates[rows]
            share = f"{nbytes / took / memory:.2f}" if rows <= 16 else ""
            limit = max(one, arithmetic / 0.8)
            print(
                f"| {name} | {rows} | {took * 1e3:.1f} | {nbytes / took / 1e9:.1f} | {share} | {took / one:.2f} | "
                f"{arithmetic * 1e3:.1f} | {took / limit:.2f} |",
                flush=True,
            )


def prefill_table(sizes: Sizes, rows: int, rounds: int) -> None:
    """Print the time of one product of many rows, packed and by torch's F.linear on the same numbers, taking turns."""
    out_features, in_features = 2 * sizes.intermediate, sizes.hidden
    weight, x = torch.randn(out_features, in_features).bfloat16(), torch.randn(rows, in_features).bfloat16()
    panels, none = pack_panels(weight), torch.empty(0)
    int8, scales = quantize_int8(weight)
    work: dict[str, Callable[[], object]] = {
        "torch F.linear bf16": lambda: F.linear(x, weight),
        "packed bf16": lambda: packed_linear(x, panels, out_features=out_features),
        "packed int8": lambda: packed_linear(x, int8, scales=scales, zeros=none, out_features=out_features),
    }
    best = dict.fromkeys(work, math.inf)
    for _ in range(rounds):
        for name, call in work.items():
            time.sleep(0.01)  # until the threads of the other one sleep
            best[name] = min(best[name], seconds(call))
    print(f"\n| {rows} rows, N={out_features}, K={in_features} | ms | G multiplications/s | speed of torch's |")
    print("|---|---|---|---|")
    torch_time = best["torch F.linear bf16"]
    for name, took in best.items():
        rate = rows * out_features * in_features / took / 1e9
        print(f"| {name} | {took * 1e3:.2f} | {rate:.0f} | {torch_time / took:.2f}x |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", choices=MODELS, default="1024", help="of 16 layers of 1024, or of SmolLM2-135M")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 64, 1024])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    isa = load_plugins().get("cpu")
    if isa is None:
        raise SystemExit("the C++ kernels are not built: run python -m trtspec_plugins.cpu")
    torch.ops.trtspec_threads.use_own(args.threads)  # as compiled graphs do
    print(f"{isa}, {args.threads} thread(s)\n")
    bandwidth_table(MODELS[args.sizes], args.formats, args.rows, args.rounds)
    prefill_table(MODELS[args.sizes], 1024, args.rounds)


if __name__ == "__main__":
    main()
