"""Fields of TensorRT-LLM's decoding configs that take values in several forms: captured layers, and paths of a tree."""

from __future__ import annotations

import ast
import logging
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from trtspec.config.base import list_to_tuple
from trtspec.config.tree import chain

logger = logging.getLogger(__name__)


def _tuple_of_set(value: Any) -> Any:
    return tuple(value) if isinstance(value, (set, frozenset)) else list_to_tuple(value)


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(layers), key=lambda layer: (layer < 0, layer)))


def _read_literal(value: Any) -> Any:
    if isinstance(value, str):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # it stays a text, which is refused
            value = ast.literal_eval(value.strip())
    return list_to_tuple(value)


Layers = Annotated[tuple[Annotated[int, Field(ge=-1)], ...], BeforeValidator(list_to_tuple)]
# a set in TensorRT-LLM, which captures in ascending order; -1, after the final norm, is the last
LayerSet = Annotated[
    tuple[Annotated[int, Field(ge=-1)], ...], BeforeValidator(_tuple_of_set), AfterValidator(_ascending)
]
Choices = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_read_literal)]


def tree_fields(name: str, choices: Choices | None, max_draft_len: int | None) -> dict[str, Any]:
    """Fields of SpeculativeConfig for a list of paths. A chain is only a number of drafts.

    The depth of the paths takes precedence over max_draft_len, with a warning, as in TensorRT-LLM.
    """
    if choices is None:
        return {}
    depth = max(map(len, choices), default=0)
    if max_draft_len not in (None, depth):
        logger.warning("max_draft_len=%s is not used: the paths of %s are %d deep", max_draft_len, name, depth)
    if tuple(sorted(choices, key=len)) == chain(len(choices)):
        return {"num_speculative_tokens": depth}
    return {"num_speculative_tokens": depth, "speculative_token_tree": str([tuple(path) for path in choices])}
