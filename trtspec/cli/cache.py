"""`trtspec cache list | prune | clear`: the engines compiled for checkpoints, and what was read from GGUF files."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from trtspec.build.cache import Cache, Kept
from trtspec.errors import ConfigError
from trtspec.hub.kept import FOLDER_VARIABLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the environment names the cache."""


def add_prune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument: the size to prune to."""
    parser.add_argument("--gb", type=float, help="gigabytes that may stay (default: the bound, TRTSPEC_CACHE_GB)")


def run(namespace: argparse.Namespace) -> int:
    """Print a row for each engine and GGUF file, the last used first."""
    cache = _cache()
    table = Table("model", "mode", "options", "size", "last used", "in use", box=None)
    for kept in reversed(cache.kept()):
        table.add_row(*_row(kept))
    Console().print(f"{cache.folder}: {_gigabytes(cache.size())} of {_gigabytes(cache.limit)}", highlight=False)
    if table.row_count:
        Console().print(table)
    return 0


def run_prune(namespace: argparse.Namespace) -> int:
    """Remove the engines and GGUF files' texts that were used longest ago."""
    if namespace.gb is not None and not 0 <= namespace.gb * 1e9 < math.inf:
        raise ConfigError(f"--gb {namespace.gb} is no size; give gigabytes, 0 or more")
    return _remove(None if namespace.gb is None else int(namespace.gb * 1e9))


def run_clear(namespace: argparse.Namespace) -> int:
    """Remove all that is not in use."""
    return _remove(0)


def _remove(limit: int | None) -> int:
    cache = _cache()
    gone, left = cache.evict(limit), cache.kept()
    used = sum(kept.in_use for kept in left)
    Console().print(
        f"{cache.folder}: {len(gone)} removed, {len(left)} left, {used} of them in use", highlight=False, soft_wrap=True
    )
    return 0


def _cache() -> Cache:
    cache = Cache.of_environment()
    if cache is None:
        raise ConfigError(f"{FOLDER_VARIABLE}=off keeps no engines; unset it, or set it to the folder of a cache")
    cache.open()
    return cache


def _row(kept: Kept) -> tuple[str, ...]:
    facts = kept.facts
    speculation: Mapping[str, Any] = facts.get("speculation") or {}
    lengths = ", ".join(map(str, speculation.get("draft_lens", ())))
    plain = facts.get("holds", "plain, and drafters of the host")
    mode = f"{speculation['mode']}, K = {lengths}" if speculation else plain
    threshold = speculation.get("draft_confidence_threshold")
    mode += "" if threshold is None else f", threshold {threshold:g}"
    options = ", ".join(f"{name} {value}" for name, value in facts.get("options", {}).items() if value is not None)
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.last_used))
    return (
        str(facts.get("model", kept.path)),
        mode,
        options,
        _gigabytes(kept.size),
        used,
        "yes" if kept.in_use else "no",
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
