"""Which residual streams EAGLE3 reads. Ids mean "after layer i" everywhere inside; -1 is after the final norm."""

from __future__ import annotations

from trtspec.errors import ConfigError


def default_capture_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """EAGLE3's three layers as "after layer i". vLLM's (2, n//2, n-3) name the same: it counts the layer entered."""
    n = num_hidden_layers
    if n == 1:
        return (0,)
    if n <= 5:
        raise ConfigError(
            f"num_hidden_layers={n} is too few to choose EAGLE3's capture layers (more than 5); set capture_layers"
        )
    return (1, n // 2 - 1, n - 4)


def capture_layers_from_vllm(ids: tuple[int, ...]) -> tuple[int, ...]:
    """vLLM's id L is the stream *entering* layer L, which is the one after layer L - 1."""
    if any(i < 1 for i in ids):
        raise ConfigError(f"aux hidden layer ids {ids}: 0 is the embedding, which is not captured; use ids >= 1")
    return tuple(i - 1 for i in ids)
