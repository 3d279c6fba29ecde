"""Options of a TensorRT engine and the shapes of its inputs. This module does not need TensorRT.

A network has two optimisation profiles. `mixed` takes any batch. `generation` takes batches of generations alone, and
its kernels are picked for max_batch_size requests of K + 1 rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trtspec.backends.graph_io import INPUTS, SLOT_ROWS
from trtspec.backends.sizes import Sizes
from trtspec.core import KVSpec
from trtspec.errors import ConfigError, UnsupportedError

MAX_BANS = 64
"""Largest number of ids that are banned in a row at a time (stop ids before min_tokens)."""

MAX_BIASES = 1024
"""Largest number of ids to which a request's logit_bias adds something."""

ATTENTIONS = ("plugin", "native")
HARDWARE = ("none", "ampere_plus", "same_compute_capability")
ARCHITECTURES = (75, 80, 86, 89, 120, 121)
"""Architectures for which TensorRT-RTX 1.7 builds: 89 is SM89."""
USUAL_ARCHITECTURES = (86, 89, 120)

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorRTOptions:
    """Options of `trtspec build --backend tensorrt`, or tensorrt_rtx, in addition to EngineConfig.

    Options that trtllm-build also has carry its names. ConfigError for invalid values, UnsupportedError for several
    workers.

    opt_num_tokens: rows for which the mixed profile is tuned; None = half of max_num_tokens. workers: number of ranks
    built at a time; an engine has one rank. attention: "plugin" for our plugin over the paged cache, or "native" for
    TensorRT's own attention over a linear cache (native.py). sm: architectures for which tensorrt_rtx builds; () =
    USUAL_ARCHITECTURES.
    """

    opt_num_tokens: int | None = None
    workers: int = 1
    input_timing_cache: str | None = None
    output_timing_cache: str | None = None
    attention: str = "plugin"
    weight_streaming: bool = False
    refit: bool = False
    strip_plan: bool = False
    version_compatible: bool = False
    hardware_compatibility: str = "none"
    sm: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in (("attention", ATTENTIONS), ("hardware_compatibility", HARDWARE)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} = {getattr(self, name)!r}; use one of {', '.join(allowed)}")
        for name in ("workers", "opt_num_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value} must be 1 or more")
        if strange := [one for one in self.sm if one not in ARCHITECTURES]:
            raise ConfigError(f"sm = {strange[0]}; TensorRT-RTX builds for {', '.join(map(str, ARCHITECTURES))}")
        if self.workers > 1:
            raise UnsupportedError(f"workers = {self.workers}: engines of several ranks are not built; use workers = 1")

    def without_plugins(self) -> TensorRTOptions:
        """Return the options of a plan of TensorRT-RTX. UnsupportedError for options that its builder does not take."""
        reasons = {
            "refit": "TensorRT-RTX 1.7 builds no such plan without a GPU",
            "strip_plan": "TensorRT-RTX 1.7 builds no such plan without a GPU",
            "version_compatible": "TensorRT-RTX 1.7 comes without the library that such plans need",
            "weight_streaming": "no test has tried it with TensorRT-RTX",
        }
        for name, reason in reasons.items():
            if getattr(self, name):
                raise UnsupportedError(f"{name} with backend tensorrt_rtx: {reason}; leave it out")
        if self.hardware_compatibility != "none":
            raise UnsupportedError("hardware_compatibility with backend tensorrt_rtx: name the architectures, as sm")
        return replace(self, attention="native", sm=self.sm or USUAL_ARCHITECTURES)

    @property
    def native(self) -> bool:
        """Whether attention is TensorRT's own."""
        return self.attention == "native"


def cache_shape(blocks: int, block_size: int, heads: int, width: int, linear: bool) -> Shape:
    """Shape of a cache; a linear cache has a slot for each block except scratch."""
    return (blocks - 1, heads, block_size, width) if linear else (blocks, block_size, heads, width)


@dataclass(frozen=True)
class Profile:
    """An optimisation profile. shapes: input -> its least, usual and largest shape."""

    name: str
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]


def profiles(
    inputs: Sequence[str],
    kv: Sequence[KVSpec],
    sizes: Sizes,
    opt_num_tokens: int | None = None,
    hidden_width: int = 0,
    vocab_size: int = 0,
) -> tuple[Profile, Profile]:
    """Return the two profiles of a ragged graph with these inputs and KV layers.

    hidden_width: width of the input hidden_states, if the graph takes it. vocab_size: that of the logits, if the graph
    takes constraints on them.
    """
    B, K = sizes.batch_size, sizes.draft_len
    draws = B * (K + 1)
    usual_rows = min(opt_num_tokens or max(sizes.rows // 2, 1), sizes.rows)
    columns, bans = (1, max(sizes.columns // 2, 1), sizes.columns), (1, 1, MAX_BANS)
    blocks = (sizes.blocks,) * 3  # the cache is allocated once
    unless = {  # sizes of constraints, of which most batches have none
        "known": (0, 0, sizes.columns * sizes.block_size),
        "kinds": (0, 0, 3),
        "biases": (0, 0, MAX_BIASES),
        "words": (0, 0, -(-vocab_size // 32)),
    }
    known = {**unless, "K": (K,) * 3, "0": (0,) * 3, "width": (hidden_width,) * 3}
    fixed = {**known, "columns": columns, "bans": bans, "blocks": blocks}
    batch = {"B": (1, B, B), "G": (0, B, B), "R": (1, draws, draws), **fixed}
    mixed = {"T": (1, usual_rows, sizes.rows), SLOT_ROWS: (1, usual_rows, sizes.rows), **batch}
    generation = {"T": (1, draws, draws), SLOT_ROWS: (1, K + 1, K + 1), **batch}
    return tuple(  # type: ignore[return-value]
        Profile(name, {**_inputs(inputs, found), **_caches(kv, sizes)})
        for name, found in (("mixed", mixed), ("generation", generation))
    )


def _inputs(inputs: Sequence[str], sizes: Mapping[str, tuple[int, int, int]]) -> dict[str, tuple[Shape, Shape, Shape]]:
    least, usual, most = ({dim: size[i] for dim, size in sizes.items()} for i in range(3))
    rows = [INPUTS[name] for name in inputs]
    return {row.name: (row.shape(least), row.shape(usual), row.shape(most)) for row in rows}


def _caches(kv: Sequence[KVSpec], sizes: Sizes) -> dict[str, tuple[Shape, Shape, Shape]]:
    return {
        f"{part}_cache_{layer}": (cache_shape(sizes.blocks, sizes.block_size, heads, width, sizes.linear),) * 3
        for layer, (heads, width, *_) in enumerate(kv)
        for part in "kv"
    }
