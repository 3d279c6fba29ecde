"""Checkpoints of float8_e4m3fn weights, in the layouts of ModelOpt and compressed-tensors.

Next to each is the floating-point checkpoint that it stands for. Scales of inputs are calibrated with transformers, as
the layouts' own writers do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import edit_config, oracle, oracle_logits
from tests.quantized_checkpoints import linears

FP8 = torch.float8_e4m3fn
FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


@dataclass(frozen=True)
class Fp8Kind:
    """A layout and its options."""

    writer: str  # modelopt, hf_quant_config (modelopt's older file), compressed-tensors
    per_channel: bool = False
    inputs: str | None = "static"  # or "dynamic", or None: weights only

    def __str__(self) -> str:
        return "-".join([self.writer, "channel" if self.per_channel else "tensor", str(self.inputs)])

    def config(self, **changes: Any) -> dict[str, Any]:
        """Contents of quantization_config or hf_quant_config.json, for a checkpoint that does not quantise lm_head."""
        if self.writer == "compressed-tensors":
            fields = {"config_groups": {"group_0": {"targets": ["Linear"], **self.scheme_fields()}}}
            common = {"quant_method": self.writer, "format": "float-quantized", "quantization_status": "compressed"}
            return {**common, **fields, "ignore": ["lm_head"], "kv_cache_scheme": None, **changes}
        algorithm = "FP8_PER_CHANNEL_PER_TOKEN" if self.per_channel else "FP8"
        producer = {"name": "modelopt", "version": "0.33.0"}
        if self.writer == "modelopt":
            fields = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "producer": producer}
            return {**fields, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, **changes}
        fields = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], **changes}
        return {"producer": producer, "quantization": fields}

    def scheme_fields(self) -> dict[str, Any]:
        """One of compressed-tensors' config_groups, without targets."""
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = {**common, "dynamic": False, "strategy": "channel" if self.per_channel else "tensor"}
        static = self.inputs == "static"
        inputs = {**common, "dynamic": not static, "strategy": "tensor" if static else "token"}
        return {"weights": weights, "input_activations": inputs if self.inputs else None}

    def stored(self, weight: Tensor, input_scale: float) -> dict[str, Tensor]:
        """The tensors of a linear [N, K], by the last part of their names."""
        scale = weight.abs().amax(1) if self.per_channel else weight.abs().amax().expand(len(weight))
        scale = (scale / 448).bfloat16().float()  # fits any dtype that scales are stored in
        tensors = {"weight": (weight / scale[:, None]).clamp(-448, 448).to(FP8)}
        if self.writer == "compressed-tensors":
            tensors["weight_scale"] = scale.bfloat16()[:, None] if self.per_channel else scale[:1].clone()
        else:
            tensors["weight_scale"] = scale.clone() if self.per_channel else scale[0].clone()
        if self.inputs == "static":
            number = torch.tensor(input_scale)
            tensors["input_scale"] = number[None] if self.writer == "compressed-tensors" else number
        return tensors

    def matrix(self, stored: dict[str, Tensor]) -> Tensor:
        """The matrix that the tensors of a linear stand for, [N, K] fp32."""
        return stored["weight"].float() * stored["weight_scale"].float().reshape(-1, 1)


def fp8(
    folder: Path,
    output: Path,
    kind: Fp8Kind,
    keep: tuple[str, ...] = ("lm_head",),
    alike: bool = False,
    **changes: Any,
) -> tuple[Path, Path, dict[str, float]]:
    """Copy the fp32 checkpoint `folder` in fp8 and in fp32; return both folders and the scale of each linear's inputs.

    The copies are under `output`. The first has all linears in fp8 except those that end in one of `keep`; the second
    has the values that these stand for. Scales of linears that read the same x differ, unless `alike`. changes: fields
    of its quantization_config.
    """
    eighths, floats = output / "fp8", output / "floats"
    for copy in (eighths, floats):
        shutil.copytree(folder, copy)
    weights = load_file(folder / "model.safetensors")
    scales = {name: largest / 448 for name, largest in _largest_inputs(folder).items()}
    if not alike:
        scales = {
            name: scale * (0.6 if name.endswith(("k_proj", "up_proj")) else 1.0) for name, scale in scales.items()
        }
    saved = dict(weights)
    for name in linears(weights):
        if name.endswith(keep):
            continue
        stored = kind.stored(weights[f"{name}.weight"], scales[name])
        weights[f"{name}.weight"] = kind.matrix(stored)
        saved |= {f"{name}.{end}": tensor.contiguous() for end, tensor in stored.items()}
        if kind.writer != "compressed-tensors" and name.endswith(("k_proj", "v_proj")):
            saved[f"{name}.{name[-6]}_scale"] = torch.tensor(0.5)
    save_file(saved, eighths / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, floats / "model.safetensors", metadata={"format": "pt"})
    data = json.loads(json.dumps(kind.config(**changes)))
    if kind.writer == "hf_quant_config":
        (eighths / "hf_quant_config.json").write_text(json.dumps(data))
    else:
        edit_config(eighths, quantization_config=data)
    return eighths, floats, scales


def _largest_inputs(folder: Path) -> dict[str, float]:
    """Largest input of each linear, over 64 tokens that are not the tests' own."""
    model, found = oracle(folder), {}

    def measure(name: str) -> Callable[..., None]:
        def hook(_: torch.nn.Module, inputs: tuple[Tensor]) -> None:
            found[name] = float(inputs[0].abs().max())

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(measure(name))
    vocab = model.config.vocab_size
    oracle_logits(model, torch.randint(vocab, (64,), generator=torch.Generator().manual_seed(99)).tolist())
    return found


def round_inputs(model: torch.nn.Module, scales: dict[str, float]) -> None:
    """Round the inputs of all linears except lm_head, by torch's cast to e4m3.

    Linears that read the same x use their largest scale.
    """

    def rounded(scale: Tensor) -> Callable[..., Tensor]:
        return lambda _, inputs: (inputs[0] / scale).clamp(-448, 448).to(FP8).float() * scale

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parent, _, own = name.rpartition(".")
            together = next((group for group in FUSED if own in group), {own})
            scale = torch.tensor(max(scales[f"{parent}.{one}"] for one in together))
            module.register_forward_pre_hook(rounded(scale))
