"""Checkpoints whose weights are integers, in the public layouts, and the floating-point checkpoints they stand for.

compressed-tensors is written and read back by its own package. GPTQ and AWQ, whose packages need a GPU, are written
from the formats' description, bit by bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import edit_config

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that the i-th four bits of a word belong to


@dataclass(frozen=True)
class Kind:
    """A layout and its options. group_size -1: a scale per output channel."""

    layout: str  # pack-quantized, int-quantized, gptq, gptq_v2, awq
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    ordered: bool = False  # inputs belong to groups in a random order
    scales: torch.dtype = torch.float16

    def __str__(self) -> str:
        words = [self.layout, f"w{self.bits}", "channel" if self.group_size == -1 else f"g{self.group_size}"]
        words += ["sym" if self.symmetric else "asym", *(["ordered"] if self.ordered else [])]
        return "-".join([*words, str(self.scales).removeprefix("torch.")])

    @property
    def is_compressed_tensors(self) -> bool:
        return self.layout.endswith("-quantized")

    def config(self, **changes: Any) -> dict[str, Any]:
        """quantization_config of a checkpoint that does not quantise lm_head."""
        if self.is_compressed_tensors:
            data: dict[str, Any] = {
                "quant_method": "compressed-tensors",
                "format": self.layout,
                "quantization_status": "compressed",
                "config_groups": {"group_0": {"targets": ["Linear"], **self.scheme_fields()}},
                "ignore": ["lm_head"],
                "kv_cache_scheme": None,
                "sparsity_config": {},
                "transform_config": {},
            }
        elif self.layout == "awq":
            data = {"quant_method": "awq", "bits": self.bits, "group_size": self.group_size, "version": "gemm"}
            data |= {"zero_point": True, "modules_to_not_convert": None}
        else:
            data = {"quant_method": "gptq", "bits": self.bits, "group_size": self.group_size, "sym": self.symmetric}
            data |= {
                "desc_act": self.ordered,
                "checkpoint_format": self.layout,
                "lm_head": False,
                "static_groups": False,
            }
        return {**data, **changes}

    def scheme_fields(self) -> dict[str, Any]:
        """One of compressed-tensors' config_groups, without targets."""
        channel = self.group_size == -1
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False}
        weights |= {"strategy": "channel" if channel else "group", "group_size": None if channel else self.group_size}
        weights["actorder"] = "group" if self.ordered else None
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        return {"weights": weights, "input_activations": inputs if self.layout == "int-quantized" else None}


@dataclass(frozen=True)
class Integers:
    """A weight [N, K] rounded to unsigned integers; scales and zero points [N, G]; the group of each input [K]."""

    values: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def matrix(self) -> Tensor:
        """The matrix that the integers stand for, fp32."""
        zeros, scales = self.zeros[:, self.groups], self.scales.float()[:, self.groups]
        return (self.values - zeros).float() * scales


def rounded(weight: Tensor, kind: Kind, order: Tensor | None = None) -> Integers:
    """Round to nearest. order [K]: the inputs, group after group. Zero points are 1..15, as gptq cannot store 0."""
    N, K = weight.shape
    size, top = K if kind.group_size == -1 else kind.group_size, 2**kind.bits - 1
    order = torch.arange(K) if order is None else order
    grouped = weight.float()[:, order].reshape(N, K // size, size)
    if kind.symmetric:
        scales = (grouped.abs().amax(2) / (top // 2)).clamp(min=1e-4).to(kind.scales)
        zeros = torch.full(scales.shape, (top + 1) // 2)
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = ((high - low) / top).clamp(min=1e-4).to(kind.scales)
        zeros = (-low / scales.float()).round().long().clamp(1, top)
    values = ((grouped / scales.float()[:, :, None]).round() + zeros[:, :, None]).clamp(0, top).long().flatten(1)
    groups = torch.empty(K, dtype=torch.int64)
    groups[order] = torch.arange(K) // size
    return Integers(values[:, order.argsort()], scales, zeros, groups)


def stored(integers: Integers, kind: Kind) -> dict[str, Tensor]:
    """The tensors of one linear, by the last part of their names."""
    if kind.is_compressed_tensors:
        return _compressed(integers, kind)
    values, zeros = integers.values.T.numpy(), integers.zeros.T.numpy()  # [K, N], [G, N]
    scales = integers.scales.T.contiguous()
    if kind.layout == "awq":
        return {"qweight": _across(values, 4, AWQ_ORDER), "qzeros": _across(zeros, 4, AWQ_ORDER), "scales": scales}
    order = tuple(range(32 // kind.bits))
    return {
        "qweight": _across(values.T, kind.bits, order).T.contiguous(),
        "qzeros": _across(zeros - (kind.layout == "gptq"), kind.bits, order),
        "scales": scales,
        "g_idx": integers.groups.int(),
    }


def _across(numbers: np.ndarray, bits: int, order: tuple[int, ...]) -> Tensor:
    """Pack each row's numbers into words of 32 bits, len(order) a word; place i of a word has its number order[i]."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // len(order)), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place, which in enumerate(order):
            words[:, word] |= numbers[:, word * len(order) + which].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def _compressed(integers: Integers, kind: Kind) -> dict[str, Tensor]:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed; it needs Python 3.11")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized import pack_to_int32
    from compressed_tensors.quantization import QuantizationScheme

    middle = 2 ** (kind.bits - 1)
    values, zeros = ((t - middle).to(torch.int8) for t in (integers.values, integers.zeros))
    tensors = {"weight_scale": integers.scales}
    if kind.layout == "pack-quantized":
        tensors |= {"weight_packed": pack_to_int32(values, kind.bits), "weight_shape": torch.tensor(values.shape)}
    else:
        tensors["weight"] = values
    if not kind.symmetric:
        packed = kind.layout == "pack-quantized"
        tensors["weight_zero_point"] = pack_to_int32(zeros, kind.bits, packed_dim=0) if packed else zeros
    if kind.ordered:
        return {**tensors, "weight_g_idx": integers.groups.int()}  # of older versions; this one does not read it
    if len(tensors.get("weight_zero_point", values)) == 1:
        return tensors  # their code cannot read a single row of words of zero points
    scheme = QuantizationScheme(targets=["Linear"], **kind.scheme_fields())
    fp32 = {**tensors, "weight_scale": integers.scales.float()}
    theirs = BaseCompressor.get_value_from_registry(kind.layout).decompress(fp32, scheme)
    assert torch.equal(theirs["weight"], integers.matrix)
    return tensors


def linears(weights: dict[str, Tensor]) -> Iterator[str]:
    """Names of the linears of a Llama-like checkpoint, lm_head included."""
    for name, tensor in weights.items():
        if tensor.ndim == 2 and "embed" not in name:
            yield name.removesuffix(".weight")


def quantised(
    folder: Path, output: Path, kind: Kind, keep: tuple[str, ...] = ("lm_head",), **changes: Any
) -> tuple[Path, Path]:
    """Copy the fp32 checkpoint `folder` with integers and with floats, and return both folders.

    The copies are under `output`. The first has integers for all linears except those that end in one of `keep`; the
    second has the values that the integers stand for. changes: fields of its quantization_config.
    """
    integers, floats = output / "integers", output / "floats"
    for copy in (integers, floats):
        shutil.copytree(folder, copy)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    orders: dict[int, Tensor] = {}  # by number of inputs, as from one Hessian: q, k and v agree
    saved = dict(weights)
    for name in linears(weights):
        if name.endswith(keep):
            continue
        weight = weights[f"{name}.weight"]
        order = orders.setdefault(weight.shape[1], torch.randperm(weight.shape[1], generator=generator))
        made = rounded(weight, kind, order if kind.ordered else None)
        weights[f"{name}.weight"] = made.matrix
        del saved[f"{name}.weight"]
        saved |= {f"{name}.{end}": tensor.contiguous() for end, tensor in stored(made, kind).items()}
    save_file(saved, integers / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, floats / "model.safetensors", metadata={"format": "pt"})
    edit_config(integers, quantization_config=json.loads(json.dumps(kind.config(**changes))))
    return integers, floats
