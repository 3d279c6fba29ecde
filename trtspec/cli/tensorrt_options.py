"""The options of `trtspec build` that go for TensorRT alone."""

from __future__ import annotations

import argparse
from dataclasses import fields

from trtspec.backends.tensorrt_profiles import ATTENTIONS, HARDWARE, TensorRTOptions
from trtspec.errors import ConfigError


def add_tensorrt(parser: argparse.ArgumentParser) -> None:
    """All unset by default, so that one which was given can be told."""
    group = parser.add_argument_group("TensorRT", "for --backend tensorrt alone")
    group.add_argument("--opt_num_tokens", type=int, help="rows of a step to tune for (default: half of the largest)")
    group.add_argument("--workers", type=int, help="ranks built at a time (default 1)")
    group.add_argument("--input_timing_cache", metavar="FILE", help="measured kernels of an earlier build, to start on")
    group.add_argument("--output_timing_cache", metavar="FILE", help="where to keep what was measured")
    group.add_argument("--attention", help=f"{' or '.join(ATTENTIONS)} (default {ATTENTIONS[0]})")
    for name, does in (
        ("weight_streaming", "let weights stay in host memory, as far as asked for at run time"),
        ("refit", "let weights be replaced in the built engine"),
        ("strip_plan", "leave weights out of the engine file"),
        ("version_compatible", "let later versions of TensorRT run it"),
    ):
        group.add_argument(f"--{name}", action="store_true", default=None, help=does)
    group.add_argument("--hardware_compatibility", help=f"{', '.join(HARDWARE)} (default {HARDWARE[0]})")


def tensorrt_options(namespace: argparse.Namespace) -> TensorRTOptions | None:
    """What was given; None for another backend, for which nothing may be given: ConfigError."""
    names = [field.name for field in fields(TensorRTOptions)]
    given = {name: getattr(namespace, name) for name in names if getattr(namespace, name) is not None}
    if namespace.backend == "tensorrt":
        return TensorRTOptions(**given)
    if given:
        options = ", ".join(f"--{name}" for name in given)
        raise ConfigError(f"{options}: for --backend tensorrt alone, this one is {namespace.backend}; leave it out")
    return None
