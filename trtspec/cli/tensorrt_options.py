"""The options of `trtspec build` that are for TensorRT alone."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from trtspec.backends.table import BACKENDS
from trtspec.backends.tensorrt.profiles import HARDWARE, USUAL_ARCHITECTURES, TensorRTOptions
from trtspec.errors import ConfigError


def add_tensorrt(parser: argparse.ArgumentParser) -> None:
    """Add the options. All are unset by default, so that given options can be recognised."""
    usual = ",".join(map(str, USUAL_ARCHITECTURES))
    group = parser.add_argument_group("TensorRT", "for --backend tensorrt and tensorrt_rtx alone")
    group.add_argument("--opt_num_tokens", type=int, help="rows of a step to tune for (default: half of the largest)")
    group.add_argument(
        "--workers", type=int, help="ranks built at a time (default 1; without tensor parallelism there is one)"
    )
    group.add_argument("--input_timing_cache", metavar="FILE", help="measured kernels of an earlier build, to start on")
    group.add_argument("--output_timing_cache", metavar="FILE", help="where to keep what was measured")
    group.add_argument(
        "--attention", help="plugin, ours over a paged cache (default), or native, TensorRT's own over a linear one"
    )
    for name, does in (
        ("weight_streaming", "weights that do not fit into the GPU's memory stay in the host's"),
        ("refit", "weights can be replaced in the built engine"),
        ("strip_plan", "weights are not in engine files, but once, next to the engines of all draft lengths"),
        ("version_compatible", "later versions of TensorRT 11 run it"),
    ):
        group.add_argument(f"--{name}", action="store_true", default=None, help=does)
    group.add_argument("--sm", type=_numbers, help=f"architectures for tensorrt_rtx, as 89,120 (default {usual})")
    group.add_argument("--num_kv_blocks", type=int, help="of the KV cache (default: for max_batch_size full sequences)")
    group.add_argument("--kv_cache_memory", type=int, help="the same in bytes")
    group.add_argument("--hardware_compatibility", help=f"{', '.join(HARDWARE)} (default {HARDWARE[0]})")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def tensorrt_options(namespace: argparse.Namespace) -> TensorRTOptions | None:
    """Return the given options; None for another backend, for which any given option raises ConfigError."""
    given = _given(namespace, [field.name for field in fields(TensorRTOptions)])
    row = BACKENDS[namespace.backend]
    if row.profiles:
        if not row.plugins and given.get("attention") == "plugin":
            raise ConfigError(f"--attention plugin: {row.name} has TensorRT's own attention alone; leave it out")
        return TensorRTOptions(**given)
    given |= cache_limits(namespace)
    if given:
        options = ", ".join(f"--{name}" for name in given)
        able = ", ".join(row.name for row in BACKENDS.values() if row.profiles)
        raise ConfigError(f"{options}: for --backend {able} alone, this one is {namespace.backend}; leave it out")
    return None


def cache_limits(namespace: argparse.Namespace) -> dict[str, int]:
    """Return the given cache limits, which are fields of EngineConfig.

    Other backends take these when an engine is loaded; TensorRT engines have caches of a fixed size.
    """
    return _given(namespace, ["num_kv_blocks", "kv_cache_memory"])


def _given(namespace: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    return {name: getattr(namespace, name) for name in names if getattr(namespace, name) is not None}
