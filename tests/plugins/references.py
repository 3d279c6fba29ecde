"""The pure-torch references, independent of the kernels that this process has loaded."""

from __future__ import annotations

import inspect
from typing import Any

import trtspec.ops
from trtspec.ops import accept, attention, compact, logits, sample

_MODULES = {
    "spec_attention": attention,
    "process_logits": logits,
    "spec_sample": sample,
    "spec_accept": accept,
    "kv_compact": compact,
}


def reference(op: str, *arguments: Any, **named: Any) -> Any:
    """Result of the op's reference for the arguments of the function of that name in trtspec.ops."""
    bound = inspect.signature(getattr(trtspec.ops, op)).bind(*arguments, **named)
    bound.apply_defaults()
    return _MODULES[op]._reference(*bound.args)
