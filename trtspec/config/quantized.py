"""`quantization_config` of a checkpoint's config.json: which linears hold integers, in which public layout.

    quant_method         format               weights
    compressed-tensors   pack-quantized       4 or 8 bits, in int32 words along the inputs
                         int-quantized        4 or 8 bits, an int8 each
    gptq                 gptq, gptq_v2        4 or 8 bits, in int32 words along the inputs
    awq                  gemm                 4 bits, in int32 words along the outputs, interleaved

4-bit weights may share a scale (and a zero point) in groups of inputs, 8-bit weights only in whole output channels and
without zero point: what `packed_linear` computes with. Everything else is refused here, by the field that asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtspec.config.reader import Reader, short
from trtspec.errors import ConfigError

GROUP_MULTIPLE = 32
"""Groups of any multiple of this many inputs are groups of 32, 64 or 128 whose scales repeat."""


@dataclass(frozen=True)
class WeightScheme:
    """How the weight of one linear is stored.

    layout: "pack-quantized", "int-quantized", "gptq" or "awq". group_size: inputs that share a scale, None = all.
    symmetric: the zero point is the middle of the range and not stored (gptq stores it all the same). ordered: there
    is a g_idx, the group of each input. zero_offset: what to add to a stored zero point.
    """

    layout: str
    bits: int
    group_size: int | None
    symmetric: bool
    ordered: bool = False
    zero_offset: int = 0

    def __str__(self) -> str:
        return (
            f"int{self.bits} {'per output channel' if self.group_size is None else f'in groups of {self.group_size}'}"
        )

    @property
    def requests(self) -> tuple[str, ...]:
        """Values of EngineConfig.quantization that mean the same bits and groups."""
        if self.bits == 8:
            return ("int8",)
        words = {128: "int4_g128", 64: "int4_g64", 32: "int4"}
        if self.group_size is None:
            return tuple(words.values())
        return (next(word for size, word in words.items() if self.group_size % size == 0),)


@dataclass(frozen=True)
class Rule:
    """Linears whose name in the checkpoint fits `pattern`, and their scheme; None = not quantised.

    kind: "name" (equal), "re" (a regular expression that fits its beginning), "part" (is in it), "suffix", "all".
    """

    kind: str
    pattern: str
    scheme: WeightScheme | None

    def fits(self, module: str) -> bool:
        """Whether this rule is about the linear."""
        if self.kind == "re":
            return re.match(self.pattern, module) is not None
        if self.kind == "part":
            return self.pattern in module
        if self.kind == "suffix":
            return f".{module}".endswith(f".{self.pattern}")
        return self.kind == "all" or module == self.pattern


@dataclass(frozen=True)
class CheckpointQuantization:
    """What config.json says of the weights: the first rule that fits a linear decides."""

    method: str
    rules: tuple[Rule, ...]

    @classmethod
    def read(cls, config: Reader) -> CheckpointQuantization | None:
        """Of config.json; None for a checkpoint of floating-point weights. Raises UnsupportedError, CheckpointError."""
        # early versions of compressed-tensors had a name of their own
        key = "quantization_config" if config.get("quantization_config") is not None else "compression_config"
        fields = config.object(key)
        if fields is None:
            return None
        read = config.sub(key, fields)
        method = read.string("quant_method", "compressed-tensors" if key == "compression_config" else None).lower()
        rules = _METHODS.get(method)
        if rules is None:
            raise read.unsupported(
                "quant_method",
                f"this quantisation is not supported; supported: {', '.join(_METHODS)}; or use the bf16, fp16 or fp32 "
                "checkpoint",
            )
        found = cls(method, rules(read))
        if config.boolean("tie_word_embeddings", False) and any(
            rule.kind == "name" and rule.pattern == "lm_head" and rule.scheme for rule in found.rules
        ):
            raise config.unsupported("tie_word_embeddings", "a quantised lm_head cannot be the embedding; untie them")
        return found

    def scheme(self, module: str) -> WeightScheme | None:
        """Of a linear by its name in the checkpoint ("model.layers.0.mlp.down_proj"); None = floating point."""
        return next((rule.scheme for rule in self.rules if rule.fits(module)), None)

    @property
    def schemes(self) -> tuple[WeightScheme, ...]:
        """Each once."""
        return tuple(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme is not None))

    def __str__(self) -> str:
        return f"{self.method}, {' and '.join(map(str, self.schemes))}"

    def check_request(self, kind: str | None, role: str) -> None:
        """`quantization` = `kind` goes for the linears that the checkpoint left in floating point; one that the
        quantised ones do not have is a ConfigError, as they are not quantised again."""
        allowed = list(dict.fromkeys(word for scheme in self.schemes for word in scheme.requests))
        if kind is not None and kind not in allowed:
            words = (
                f", or {' or '.join(map(repr, allowed))} for the linears that it left unquantised" if allowed else ""
            )
            raise ConfigError(
                f"quantization = {kind!r}: the {role}'s checkpoint is quantised already ({self}); leave it unset{words}"
            )


# -- compressed-tensors -----------------------------------------------------------------------------------------------

_FORMATS = ("pack-quantized", "int-quantized")


def _compressed_tensors(read: Reader) -> tuple[Rule, ...]:
    if read.string("quantization_status", "compressed") != "compressed":
        raise read.unsupported("quantization_status", "only checkpoints that were saved compressed are supported")
    _format(read)
    for key in ("kv_cache_scheme", "transform_config"):
        if read.get(key):
            raise read.unsupported(key, "this is not supported; use a checkpoint of quantised weights alone")
    sparsity = read.object("sparsity_config")
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise read.unsupported("sparsity_config", "sparse weights are not supported; use a checkpoint without")
    ignored = [_rule(read, "ignore", target, None) for target in _strings(read, "ignore")]
    groups = read.object("config_groups")
    if not groups:
        raise read.error("config_groups", "is missing; it says how the weights are quantised. Download the file again")
    named = read.sub("config_groups", groups)
    rules = []
    for name in groups:
        group = named.object(name) if isinstance(groups[name], dict) else None
        if group is None:
            raise named.unsupported(name, "presets are not supported; write the group's weights and targets out")
        one = named.sub(name, group)
        scheme = _scheme(one, _format(one) if one.get("format") is not None else _format(read))
        rules += [_rule(one, "targets", target, scheme) for target in _strings(one, "targets")]
    # a name wins over an expression, that over the class
    return (*ignored, *sorted(rules, key=lambda rule: ("name", "re", "all").index(rule.kind)))


def _format(read: Reader) -> str:
    text = read.string("format")
    if text not in _FORMATS:
        raise read.unsupported("format", f"this format is not supported; supported: {', '.join(_FORMATS)}")
    return text


def _rule(read: Reader, key: str, target: str, scheme: WeightScheme | None) -> Rule:
    if not target.startswith("re:"):
        return Rule("all", "", scheme) if target == "Linear" else Rule("name", target, scheme)
    pattern = target.removeprefix("re:")
    try:
        re.compile(pattern)
    except re.error as error:
        raise read.error(key, f"has {target!r}, which is no regular expression ({error}); correct it") from error
    return Rule("re", pattern, scheme)


def _scheme(read: Reader, layout: str) -> WeightScheme:
    """Of one of config_groups."""
    weights = read.sub("weights", read.object("weights") or {})
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "group" if weights.integer("group_size") > 0 else "channel"
    strategy = weights.string("strategy", inferred)
    if weights.string("type", "int") != "int":
        raise weights.unsupported("type", "only integer weights are supported")
    if strategy not in ("group", "channel"):
        raise weights.unsupported("strategy", "only group and channel are supported")
    if weights.get("dynamic"):
        raise weights.unsupported("dynamic", "only weights with stored scales are supported")
    order = weights.get("actorder")
    group_size = None if strategy == "channel" else weights.positive_int("group_size")
    symmetric, bits = weights.boolean("symmetric", True), weights.integer("num_bits", 8)
    _check(weights, ("num_bits", bits), ("group_size", group_size), ("symmetric", symmetric))
    _check_activations(read)
    return WeightScheme(layout, bits, group_size, symmetric, ordered=order is True or order in ("group", "dynamic"))


def _check_activations(read: Reader) -> None:
    """Only what happens anyway: each row is rounded to int8 with a scale of its own."""
    if read.get("output_activations") is not None:
        raise read.unsupported("output_activations", "quantised outputs are not supported")
    inputs = read.object("input_activations")
    if inputs is None:
        return
    given = read.sub("input_activations", inputs)
    for key, wanted, default in (
        ("num_bits", 8, 8),
        ("type", "int", "int"),
        ("symmetric", True, True),
        ("dynamic", True, False),
        ("strategy", "token", "token"),
    ):
        value = default if given.get(key) is None else given.get(key)
        if value != wanted:
            raise given.unsupported(
                key, f"inputs are rounded to int8 per row as they come; only {short(wanted)} is run"
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
    _check(read, ("bits", bits), ("group_size", group_size), ("sym", symmetric))
    scheme = WeightScheme(
        "gptq", bits, group_size, symmetric, read.boolean("desc_act", False), zero_offset=int(text == "gptq")
    )
    head = Rule("name", "lm_head", scheme if read.boolean("lm_head", False) else None)
    inside = _strings(read, "modules_in_block_to_quantize")
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
    _check(read, ("bits", bits), ("group_size", group_size), ("zero_point", False))
    scheme = WeightScheme("awq", bits, group_size, symmetric=False)
    kept = [Rule("part", name, None) for name in _strings(read, "modules_to_not_convert")]
    return (Rule("name", "lm_head", None), *kept, Rule("all", "", scheme))


# -- all --------------------------------------------------------------------------------------------------------------


def _check(read: Reader, bits: tuple[str, int], size: tuple[str, int | None], symmetric: tuple[str, bool]) -> None:
    """What the kernels hold; each given as (field, value)."""
    advice = "use a 4-bit checkpoint, or the unquantised one with quantization='int8'"
    if bits[1] not in (4, 8):
        raise read.unsupported(bits[0], "only 4 and 8 bits are supported")
    if bits[1] == 8 and size[1] is not None:
        raise read.unsupported(size[0], f"8-bit weights have one scale per output channel here, no groups; {advice}")
    if bits[1] == 8 and not symmetric[1]:
        raise read.unsupported(symmetric[0], f"8-bit weights have no zero points here; {advice}")
    if size[1] is not None and (size[1] < 1 or size[1] % GROUP_MULTIPLE):
        raise read.unsupported(
            size[0],
            f"4-bit weights come in groups of a multiple of {GROUP_MULTIPLE} inputs, or per output channel; use such a "
            "checkpoint, or the unquantised one with quantization='int4'",
        )


def _strings(read: Reader, key: str) -> list[str]:
    """A list of strings, or of lists of strings, or nothing."""
    value = read.get(key) or []
    flat: list[Any] = []
    for entry in value if isinstance(value, list) else [value]:
        flat += entry if isinstance(entry, list) else [entry]
    if any(not isinstance(entry, str) or not entry for entry in flat):
        raise read.error(key, f"= {short(value)} is not a list of names; correct it in the file")
    return flat


_METHODS: dict[str, Callable[[Reader], tuple[Rule, ...]]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
}
