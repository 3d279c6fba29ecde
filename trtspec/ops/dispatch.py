"""The torch library `trtspec`: contracts are defined here, references implement them, plugins override references."""

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
LOADED_LAST = ("flashinfer",)
"""Plugins that load last: they handle some calls, and pass the others to the kernels registered before them."""


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define `trtspec::<schema>` with its reference (any device) and its fake (shapes only). Returns the overload."""
    name = schema.split("(", 1)[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"trtspec::{name}", fake, lib=_library)
    return getattr(torch.ops.trtspec, name).default


@functools.cache
def load_plugins() -> dict[str, str]:
    """Load installed kernel packages (entry points of group `trtspec.plugins`): name -> its description of itself.

    An entry point names a function that registers kernels for a dispatch key and returns a description of them. It
    registers none and returns "" where no device can run them. A failing entry point is reported, in one line, and
    skipped; the references then serve.

    TRTSPEC_PLUGINS in the environment has the names to load ("cpu,triton"), or is 0 for none. If it is not set, all are
    loaded.
    """
    found = {entry_point.name: entry_point for entry_point in importlib.metadata.entry_points(group=PLUGIN_GROUP)}
    asked = os.environ.get("TRTSPEC_PLUGINS")
    names = list(found) if not asked else [] if asked == "0" else [name.strip() for name in asked.split(",")]
    loaded: dict[str, str] = {}
    for name in sorted(names, key=LOADED_LAST.__contains__):
        if name not in found:
            known = ", ".join(found) or "none"
            logger.warning("TRTSPEC_PLUGINS=%s: %r is not installed; there are: %s", asked, name, known)
            continue
        try:
            if said := str(found[name].load()()):
                loaded[name] = said
        except Exception as error:
            logger.warning("%s kernels do not serve, the reference kernels do: %s", name, error)
    return loaded


def has_op(library: str, name: str) -> bool:
    """Whether loaded kernels provide the op `name` in the torch library `library`, which is their own."""
    return hasattr(getattr(torch.ops, library), name)


def kernel_interface() -> str:
    """Digest of what compiled graphs rely on in the loaded kernels: how graphs call them, and how weights are packed.

    It is empty if graphs call none.
    """
    calls = sorted(line for lines in graph_calls().values() for line in lines)
    return hashlib.sha256(repr((LAYOUT, calls)).encode()).hexdigest()[:16] if calls else ""


def graph_calls() -> dict[Any, list[str]]:
    """Op overload -> C declarations of functions that a compiled graph may call instead, of the loaded kernel packages.

    They come from entry points of group `trtspec.graph_calls`.
    """
    calls: dict[Any, list[str]] = {}
    for entry_point in importlib.metadata.entry_points(group=GRAPH_CALL_GROUP):
        if entry_point.name in load_plugins():
            declared: dict[str, str] = entry_point.load()()
            calls |= {getattr(torch.ops.trtspec, name).default: [line] for name, line in declared.items()}
    return calls
