"""Reader of `quantization_config` with quant_method modelopt, and of hf_quant_config.json: NVIDIA's Model Optimizer."""

from __future__ import annotations

from trtspec.config.checkpoint.reader import Reader
from trtspec.config.checkpoint.weight_schemes import Fp8Scheme, Rule, strings

_SCHEMES = {"FP8": Fp8Scheme(0, static=True), "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme(1, static=False)}
"""quant_algo -> scheme of the weights."""


def modelopt(read: Reader) -> tuple[Rule, ...]:
    scheme = _SCHEMES.get(read.string("quant_algo").upper())
    if scheme is None:
        raise read.unsupported(
            "quant_algo",
            f"this is not supported; supported: {', '.join(_SCHEMES)}; or use the bf16, fp16 or fp32 checkpoint",
        )
    # config.json calls the key "ignore", hf_quant_config.json "exclude_modules"
    kept = [name for key in ("ignore", "exclude_modules") for name in strings(read, key)]
    return (*(Rule("glob", name, None) for name in kept), Rule("all", "", scheme))
