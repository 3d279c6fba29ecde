"""`quantization_config` of a checkpoint's config.json: which linears are quantised, and in which public layout.

    quant_method         format               weights
    compressed-tensors   pack-quantized       4 or 8 bits, in int32 words along the inputs
                         int-quantized        4 or 8 bits, an int8 each
                         float-quantized      float8_e4m3fn; naive-quantized is the same
    gptq                 gptq, gptq_v2        4 or 8 bits, in int32 words along the inputs
    awq                  gemm                 4 bits, in int32 words along the outputs, interleaved
    modelopt             FP8, and per channel float8_e4m3fn; may be said in hf_quant_config.json alone

Integer weights share a scale in groups of inputs or in whole output channels. 4-bit weights may also share a zero
point; 8-bit weights have none. This is what `packed_linear` computes with. Everything else is refused here, and the
error names the field that asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trtspec.config.checkpoint.compressed_tensors import compressed_tensors
from trtspec.config.checkpoint.modelopt import modelopt
from trtspec.config.checkpoint.reader import Reader
from trtspec.config.checkpoint.weight_schemes import IntegerScheme, Rule, WeightScheme, check_integers, strings
from trtspec.errors import ConfigError


@dataclass(frozen=True)
class CheckpointQuantization:
    """The quantisation of the weights, as config.json states it. The first rule that fits a linear decides.

    kv_scales: there may be scales of keys and values, for a KV cache in fp8. trtspec's cache is in the model's dtype.
    """

    method: str
    rules: tuple[Rule, ...]
    kv_scales: bool = False

    @classmethod
    def read(cls, config: Reader, hf_quant_config: Reader | None = None) -> CheckpointQuantization | None:
        """Read the quantisation from config.json; None for a checkpoint of floating-point weights.

        If config.json does not state it, hf_quant_config.json next to it does, `hf_quant_config`. Raises
        UnsupportedError, CheckpointError.
        """
        # early versions of compressed-tensors had their own name for the key
        key = "quantization_config" if config.get("quantization_config") is not None else "compression_config"
        fields, default = config.object(key), "compressed-tensors" if key == "compression_config" else None
        if fields is not None:
            read = config.sub(key, fields)
        elif hf_quant_config is not None and hf_quant_config.data:
            read, default = hf_quant_config, "modelopt"
        else:
            return None
        method = read.string("quant_method", default).lower()
        if (nested := read.object("quantization")) is not None:  # as in hf_quant_config.json
            read = read.sub("quantization", nested)
        rules = (_METHODS | _REFUSED).get(method)
        if rules is None:
            raise read.unsupported(
                "quant_method",
                f"this quantisation is not supported; supported: {', '.join(_METHODS)}; or use the bf16, fp16 or fp32 "
                "checkpoint",
            )
        found = cls(method, rules(read), _has_kv_scales(read))
        if config.boolean("tie_word_embeddings", False) and any(
            rule.kind == "name" and rule.pattern == "lm_head" and rule.scheme for rule in found.rules
        ):
            raise config.unsupported("tie_word_embeddings", "a quantised lm_head cannot be the embedding; untie them")
        return found

    def scheme(self, module: str) -> WeightScheme | None:
        """Scheme of a linear by its name in the checkpoint ("model.layers.0.mlp.down_proj"); None = floating point."""
        return next((rule.scheme for rule in self.rules if rule.fits(module)), None)

    def renamed(self, modules: Mapping[str, str]) -> CheckpointQuantization:
        """The same quantisation for linears with other names. modules: other name -> the checkpoint's name."""
        rules = [Rule("name", ours, self.scheme(theirs)) for ours, theirs in modules.items() if ours != theirs]
        return replace(self, rules=(*rules, *self.rules))

    @property
    def names(self) -> tuple[str, ...]:
        """Names that users give to it: the method, and the kinds of its weights."""
        return (self.method, *dict.fromkeys(scheme.kind for scheme in self.schemes))

    @property
    def schemes(self) -> tuple[WeightScheme, ...]:
        """Schemes of all rules, each once."""
        return tuple(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme is not None))

    def __str__(self) -> str:
        return f"{self.method}, {' and '.join(map(str, self.schemes))}"

    def check_request(self, kind: str | None, role: str) -> None:
        """Raise ConfigError if quantization = `kind` is asked for and the quantised linears are of another kind.

        `kind` is for the linears that the checkpoint left in floating point. The others are not quantised again.
        """
        allowed = list(dict.fromkeys(word for scheme in self.schemes for word in scheme.requests))
        if kind is not None and kind not in allowed:
            words = (
                f", or {' or '.join(map(repr, allowed))} for the linears that it left unquantised" if allowed else ""
            )
            raise ConfigError(
                f"quantization = {kind!r}: the {role}'s checkpoint is quantised already ({self}); leave it unset{words}"
            )


# -- gptq -------------------------------------------------------------------------------------------------------------


def _gptq(read: Reader) -> tuple[Rule, ...]:
    key = "checkpoint_format" if read.get("checkpoint_format") is not None else "format"
    text = read.string(key, "gptq").lower()
    if text not in ("gptq", "gptq_v2") or read.boolean("is_marlin_format", False):
        raise read.unsupported(key, "this format is not supported; supported: gptq, gptq_v2")
    if read.get("dynamic"):
        raise read.unsupported("dynamic", "settings of single modules are not supported; quantise all alike")
    if read.string("pack_dtype", "int32") != "int32":
        raise read.unsupported("pack_dtype", "only int32 is supported")
    bits, size, symmetric = read.integer("bits"), read.integer("group_size"), read.boolean("sym", True)
    group_size = None if size == -1 else size
    check_integers(read, ("bits", bits), ("group_size", group_size), ("sym", symmetric))
    scheme = IntegerScheme(
        "gptq", bits, group_size, symmetric, read.boolean("desc_act", False), zero_offset=int(text == "gptq")
    )
    head = Rule("name", "lm_head", scheme if read.boolean("lm_head", False) else None)
    inside = strings(read, "modules_in_block_to_quantize")
    return (head, *(Rule("suffix", name, scheme) for name in inside)) if inside else (head, Rule("all", "", scheme))


# -- awq --------------------------------------------------------------------------------------------------------------


def _awq(read: Reader) -> tuple[Rule, ...]:
    key = "version" if read.get("version") is not None else "format"
    if read.string(key, "gemm").lower() != "gemm":
        raise read.unsupported(key, "this format is not supported; supported: gemm")
    if read.get("backend") == "llm-awq":
        raise read.unsupported("backend", "its layout is not supported; use a checkpoint of version gemm")
    if not read.boolean("zero_point", True):
        raise read.unsupported("zero_point", "only true is supported")
    bits, size = read.integer("bits"), read.integer("group_size")
    if bits != 4:
        raise read.unsupported("bits", "only 4 is supported")
    group_size = None if size == -1 else size
    check_integers(read, ("bits", bits), ("group_size", group_size), ("zero_point", False))
    scheme = IntegerScheme("awq", bits, group_size, symmetric=False)
    kept = [Rule("part", name, None) for name in strings(read, "modules_to_not_convert")]
    return (Rule("name", "lm_head", None), *kept, Rule("all", "", scheme))


# -- fp8 --------------------------------------------------------------------------------------------------------------


def _fp8(read: Reader) -> tuple[Rule, ...]:
    key = "weight_block_size" if read.get("weight_block_size") is not None else "quant_method"
    what = "fp8 weights with a scale for each block are" if key == "weight_block_size" else "this fp8 layout is"
    raise read.unsupported(
        key,
        f"{what} not supported; use a checkpoint of modelopt (FP8) or compressed-tensors (float-quantized), whose "
        "weights have a scale per tensor or output channel, or the bf16 one",
    )


def _has_kv_scales(read: Reader) -> bool:
    """Whether the config is for a KV cache in fp8. UnsupportedError for a KV cache that is quantised otherwise."""
    algorithm = read.get("kv_cache_quant_algo")  # modelopt's name in hf_quant_config.json
    if algorithm is not None and algorithm not in ("FP8", "fp8"):
        raise read.unsupported(
            "kv_cache_quant_algo", "this is not supported; use a checkpoint of quantised weights alone"
        )
    scheme = read.object("kv_cache_scheme") or {}
    if scheme and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        raise read.unsupported("kv_cache_scheme", "this is not supported; use a checkpoint of quantised weights alone")
    return algorithm is not None or bool(scheme)


_METHODS: dict[str, Callable[[Reader], tuple[Rule, ...]]] = {
    "compressed-tensors": compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": modelopt,
}
_REFUSED: dict[str, Callable[[Reader], tuple[Rule, ...]]] = {"fp8": _fp8}
