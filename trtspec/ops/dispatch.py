"""One torch library named `trtspec`: contracts are defined here, references fill them, plugins override them."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from trtspec.ops.packing import LAYOUT

logger = logging.getLogger(__name__)

_library = torch.library.Library("trtspec", "DEF")  # type: ignore[no-untyped-call]

PLUGIN_GROUP = "trtspec.plugins"
GRAPH_CALL_GROUP = "trtspec.graph_calls"


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define `trtspec::<schema>` with its reference (any device) and its fake (shapes only); returns the overload."""
    name = schema.split("(", 1)[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"trtspec::{name}", fake, lib=_library)
    return getattr(torch.ops.trtspec, name).default


@functools.cache
def load_plugins() -> dict[str, str]:
    """Load every installed kernel package (entry points of group `trtspec.plugins`): name -> what it says of itself.

    An entry point names a function that registers kernels for a dispatch key. One that fails is reported, in one line,
    and skipped: the references serve. TRTSPEC_PLUGINS=0 in the environment skips all of them.
    """
    loaded: dict[str, str] = {}
    if os.environ.get("TRTSPEC_PLUGINS") == "0":
        return loaded
    for entry_point in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        try:
            loaded[entry_point.name] = str(entry_point.load()())
        except Exception as error:
            logger.warning("%s kernels do not serve, the reference kernels do: %s", entry_point.name, error)
    return loaded


def kernel_interface() -> str:
    """A digest of what compiled graphs rely on in the kernels that have loaded: how they are called, and how weights
    are packed. Empty where graphs call none."""
    calls = sorted(line for lines in graph_calls().values() for line in lines)
    return hashlib.sha256(repr((LAYOUT, calls)).encode()).hexdigest()[:16] if calls else ""


def graph_calls() -> dict[Any, list[str]]:
    """Op overload -> C declaration of a function that a compiled graph may call in its place (entry points of group
    `trtspec.graph_calls`), of the kernel packages that have loaded."""
    calls: dict[Any, list[str]] = {}
    for entry_point in importlib.metadata.entry_points(group=GRAPH_CALL_GROUP):
        if entry_point.name in load_plugins():
            declared: dict[str, str] = entry_point.load()()
            calls |= {getattr(torch.ops.trtspec, name).default: [line] for name, line in declared.items()}
    return calls
