"""Fields of TensorRT-LLM's decoding configs that take values in several forms: captured layers, and paths of a tree."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from trtspec.config.base import list_to_tuple
from trtspec.config.tree import chain
from trtspec.errors import ConfigError


def _tuple_of_set(value: Any) -> Any:
    return tuple(value) if isinstance(value, (set, frozenset)) else list_to_tuple(value)


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(layers), key=lambda layer: (layer < 0, layer)))


Layers = Annotated[tuple[Annotated[int, Field(ge=-1)], ...], BeforeValidator(list_to_tuple)]
# a set in TensorRT-LLM, which captures in ascending order; -1, after the final norm, is the last
LayerSet = Annotated[
    tuple[Annotated[int, Field(ge=-1)], ...], BeforeValidator(_tuple_of_set), AfterValidator(_ascending)
]
Choices = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(list_to_tuple)]


def tree_fields(name: str, choices: Choices | None, max_draft_len: int | None) -> dict[str, Any]:
    """Fields of SpeculativeConfig for a list of paths. A chain is only a number of drafts.

    Raises ConfigError if max_draft_len is not the depth.
    """
    if choices is None:
        return {}
    depth = max(map(len, choices), default=0)
    if max_draft_len not in (None, depth):
        raise ConfigError(f"{name}={choices} and max_draft_len={max_draft_len} differ; set one of them")
    if tuple(sorted(choices, key=len)) == chain(len(choices)):
        return {"num_speculative_tokens": depth}
    return {"num_speculative_tokens": depth, "speculative_token_tree": str([tuple(path) for path in choices])}
