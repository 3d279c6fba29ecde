"""Reader of `quantization_config` with quant_method compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Callable

from trtspec.config.checkpoint.reader import Reader, short
from trtspec.config.checkpoint.weight_schemes import (
    Fp8Scheme,
    IntegerScheme,
    Rule,
    WeightScheme,
    check_integers,
    strings,
)

_FORMATS = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float", "naive-quantized": "float"}
"""Format -> type of its weights."""


def compressed_tensors(read: Reader) -> tuple[Rule, ...]:
    if read.string("quantization_status", "compressed") != "compressed":
        raise read.unsupported("quantization_status", "only checkpoints that were saved compressed are supported")
    _format(read)
    if read.get("transform_config"):
        raise read.unsupported("transform_config", "this is not supported; use a checkpoint without")
    sparsity = read.object("sparsity_config")
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise read.unsupported("sparsity_config", "sparse weights are not supported; use a checkpoint without")
    ignored = [_rule(read, "ignore", target, None) for target in strings(read, "ignore")]
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
        rules += [_rule(one, "targets", target, scheme) for target in strings(one, "targets")]
    # a name wins over an expression, and an expression over the class
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
    """Weight scheme of one of config_groups."""
    weights = read.sub("weights", read.object("weights") or {})
    if weights.string("type", "int") != _FORMATS[layout]:
        raise weights.unsupported("type", f"weights in format {layout} are of type {_FORMATS[layout]}")
    if weights.get("dynamic"):
        raise weights.unsupported("dynamic", "only weights with stored scales are supported")
    if read.get("output_activations") is not None:
        raise read.unsupported("output_activations", "quantised outputs are not supported")
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "group" if weights.integer("group_size") > 0 else "channel"
    strategy = weights.string("strategy", inferred)
    known, make = _TYPES[_FORMATS[layout]]
    if strategy not in known:
        raise weights.unsupported(
            "strategy",
            f"only {' and '.join(known)} are supported; use a checkpoint that is quantised so, or the unquantised one",
        )
    return make(read, weights, strategy, layout)


def _integers(read: Reader, weights: Reader, strategy: str, layout: str) -> WeightScheme:
    order = weights.get("actorder")
    group_size = None if strategy == "channel" else weights.positive_int("group_size")
    symmetric, bits = weights.boolean("symmetric", True), weights.integer("num_bits", 8)
    check_integers(weights, ("num_bits", bits), ("group_size", group_size), ("symmetric", symmetric))
    _check_integer_inputs(read)
    return IntegerScheme(layout, bits, group_size, symmetric, ordered=order is True or order in ("group", "dynamic"))


def _check_integer_inputs(read: Reader) -> None:
    """Raise UnsupportedError for inputs that are rounded otherwise than here: each row to int8 with its own scale."""
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


def _fp8(read: Reader, weights: Reader, strategy: str, layout: str) -> WeightScheme:
    """Scheme of float8_e4m3fn weights.

    Inputs may be rounded to multiples of a stored scale. Inputs that were meant to be rounded dynamically stay
    unrounded.
    """
    inputs = read.object("input_activations")
    given = read.sub("input_activations", inputs or {})
    for reader, strategies in ((weights, (strategy,)), *([(given, ("tensor", "token"))] if inputs else [])):
        for key, default, allowed in (
            ("num_bits", 8, (8,)),
            ("type", "int", ("float",)),
            ("symmetric", True, (True,)),
            ("strategy", "tensor", strategies),
        ):
            value = default if reader.get(key) is None else reader.get(key)
            if value not in allowed:
                raise reader.unsupported(key, f"of float8_e4m3fn, {' or '.join(map(short, allowed))} is supported")
    static = inputs is not None and not given.boolean("dynamic", False)
    if static and given.get("strategy") == "token":
        raise given.unsupported("strategy", "stored scales of inputs are supported per tensor")
    return Fp8Scheme(2 if strategy == "channel" else 0, static)


_TYPES: dict[str, tuple[tuple[str, ...], Callable[[Reader, Reader, str, str], WeightScheme]]] = {
    "int": (("group", "channel"), _integers),
    "float": (("tensor", "channel"), _fp8),
}
"""Type of weights -> (its strategies, the function that makes a scheme of (group, its weights, strategy, layout))."""
