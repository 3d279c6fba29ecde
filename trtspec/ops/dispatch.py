"""One torch library named `trtspec`: contracts are defined here, references fill them, plugins override them."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_library = torch.library.Library("trtspec", "DEF")  # type: ignore[no-untyped-call]

PLUGIN_GROUP = "trtspec.plugins"


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define `trtspec::<schema>` with its reference (any device) and its fake (shapes only); returns the overload."""
    name = schema.split("(", 1)[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"trtspec::{name}", fake, lib=_library)
    return getattr(torch.ops.trtspec, name).default


def load_plugins() -> list[str]:
    """Import every installed kernel package (entry-point group `trtspec.plugins`); returns the names that loaded.

    A plugin's module registers its kernels for its dispatch key when imported. One that fails to load is reported
    and skipped: the references serve.
    """
    loaded = []
    for entry_point in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        try:
            entry_point.load()
            loaded.append(entry_point.name)
        except Exception as error:
            logger.warning(
                "kernel plugin %s did not load (%s); reference kernels serve instead", entry_point.name, error
            )
    return loaded
