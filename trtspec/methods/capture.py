"""Selection of the target's residual streams that a method reads.

An id i means "after layer i"; -1 is the state after the final norm.
"""

from __future__ import annotations

from trtspec.config.checkpoint.reader import Reader, short
from trtspec.config.speculation_plan import DraftInfo, TargetInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError


def default_capture_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """Return EAGLE3's three default layers as "after layer i".

    vLLM's ids (2, n//2, n-3) name the same layers, because vLLM's id is that of the layer entered.
    """
    n = num_hidden_layers
    if n == 1:
        return (0,)
    if n <= 5:
        raise ConfigError(
            f"num_hidden_layers={n} is too few to choose EAGLE3's capture layers (more than 5); set capture_layers"
        )
    return (1, n // 2 - 1, n - 4)


def capture_layers_from_vllm(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Convert vLLM's ids to "after layer i".

    vLLM's id L is the stream that *enters* layer L, which is the stream after layer L - 1. ConfigError for id 0, the
    embedding.
    """
    if any(i < 1 for i in ids):
        raise ConfigError(f"aux hidden layer ids {ids}: 0 is the embedding, which is not captured; use ids >= 1")
    return tuple(i - 1 for i in ids)


def named_layers(read: Reader, name: str, first: int) -> tuple[int, ...]:
    """Read the list of layer ids at `name` of a config.json as "after layer i".

    first: the file's id for "after layer 0". Raises CheckpointError for a value that is no list of layer ids, and
    UnsupportedError for the id of the embedding.
    """
    ids = read.get(name)
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < first - 1 for i in ids):
        raise read.error(name, f"= {short(ids)} is not a list of layer numbers >= {first}; correct config.json")
    if first - 1 in ids:
        raise read.unsupported(name, f"{first - 1} is the embedding, which is not captured; use a draft without")
    return tuple(i - first for i in ids)


def last_state(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None) -> tuple[int, ...]:
    """Return (-1,): the method reads the states after the last norm."""
    return (-1,)


def chosen_layers(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None) -> tuple[int, ...]:
    """Return the user's layers, else the draft checkpoint's, else EAGLE3's default.

    ConfigError for layers that the target does not have.
    """
    layers = config.capture_layers
    if layers is None and draft is not None:
        layers = draft.capture_layers
    if layers is None:
        return default_capture_layers(target.num_hidden_layers)
    if any(i >= target.num_hidden_layers for i in layers):
        whose = "" if config.capture_layers is not None else f" of the draft model={config.model!r}"
        raise ConfigError(
            f"capture_layers={layers}{whose} reaches past the target's {target.num_hidden_layers} layers; use "
            f"{'ids in' if not whose else 'the head trained for this target, or set capture_layers to ids in'} "
            f"[-1, {target.num_hidden_layers - 1}]"
        )
    return layers
