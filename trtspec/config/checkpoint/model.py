"""A checkpoint's config.json and generation_config.json, read once, checked, and normalised.

Hugging Face spells the same facts in several ways. Rotary parameters are in `rope_scaling` + `rope_theta` or in
`rope_parameters`. The dtype is `torch_dtype` or `dtype`. A window is for all layers, for the layers from
`max_window_layers` on, or for those named in `layer_types`. All other code sees one spelling.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtspec.config.checkpoint.folder import CheckpointConfig, read_checkpoint
from trtspec.config.checkpoint.reader import Reader, read_json, short

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
HIDDEN_ACTS = ("silu",)
DTYPES = ("float32", "float16", "bfloat16")
_HIDDEN_ACT_ALIASES = {"swish": "silu"}
_SAMPLING_KEYS = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions as in transformers, with defaults filled in.

    `original_max_position_embeddings` is in tokens. For `dynamic` it is max_position_embeddings, as in transformers.
    `attention_factor` multiplies cos and sin. For `yarn` it is already derived from factor and mscale, otherwise it
    is 1.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig(CheckpointConfig):
    """The config of one decoder.

    Dimensions are in elements, `windows[i]` in tokens (None = layer i attends to everything). `eos_token_ids` is the
    union of config.json's and generation_config.json's; the tokenizer may add its own. `generation_defaults` holds
    those of temperature, top_k, top_p and min_p that generation_config.json sets with `do_sample`, and its
    repetition_penalty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig
    dtype: str
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    pad_token_id: int | None
    generation_defaults: Mapping[str, float | int] = field(compare=False)

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str], role: str = "target") -> ModelConfig:
        """Read the folder `path`, then as `of`. role: "target" or "draft", the name of this model in errors."""
        return cls.of(read_checkpoint(path, role), role)

    @classmethod
    def of(cls, checkpoint: CheckpointConfig, role: str = "target") -> ModelConfig:
        """Config of a decoder whose config.json has been read as `checkpoint`; generation_config.json is read here.

        Raises CheckpointError for a missing or damaged file and for missing or ill-typed fields. Raises
        UnsupportedError for what is known but not built (rope type, activation, kind of quantised weights).
        """
        folder = checkpoint.path
        read = Reader(dict(checkpoint.raw), folder / "config.json", role)
        generation = Reader(
            read_json(folder / "generation_config.json", role, required=False), folder / "generation_config.json", role
        )
        model_type = read.string("model_type", "")
        vocab_size = read.positive_int("vocab_size")
        hidden_size = read.positive_int("hidden_size")
        num_layers = read.positive_int("num_hidden_layers")
        num_heads = read.positive_int("num_attention_heads")
        num_kv_heads = read.positive_int("num_key_value_heads", num_heads)
        # only Qwen3's class fixes head_dim; in other models a missing head_dim follows from hidden_size
        head_dim = read.positive_int("head_dim", 128 if model_type == "qwen3" else max(hidden_size // num_heads, 1))
        max_positions = read.positive_int("max_position_embeddings")
        if num_heads % num_kv_heads:
            raise read.error(
                "num_key_value_heads", f"= {num_kv_heads} does not divide num_attention_heads = {num_heads}"
            )
        if head_dim % 2:
            raise read.error("head_dim", f"= {head_dim} is odd; rotary positions need an even one")
        return cls(
            path=folder,
            architecture=read.architecture(),
            model_type=model_type,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=read.positive_int("intermediate_size"),
            hidden_act=_hidden_act(read),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6, minimum=0.0),
            max_position_embeddings=max_positions,
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            attention_bias=read.boolean("attention_bias", False),
            mlp_bias=read.boolean("mlp_bias", False),
            windows=_windows(read, model_type, num_layers),
            rope=_rope(read, max_positions),
            dtype=_dtype(read),
            eos_token_ids=_eos(read, vocab_size) | _eos(generation, vocab_size),
            bos_token_id=_token_id(read, generation, "bos_token_id"),
            pad_token_id=_token_id(read, generation, "pad_token_id"),
            generation_defaults=_generation_defaults(generation),
            raw=read.data,
            quantization=checkpoint.quantization,
        )

    @property
    def max_seq_len(self) -> int:
        """Number of tokens that the checkpoint is meant for.

        Rope scaling stretches max_position_embeddings, unless that is the stretched length already. It is for llama3 by
        convention, and for yarn if that names a shorter original length.
        """
        rope = self.rope
        if rope.rope_type == "yarn":
            return max(self.max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
        if rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * rope.factor)
        return self.max_position_embeddings


def _hidden_act(read: Reader) -> str:
    act = read.string("hidden_act", "silu")
    act = _HIDDEN_ACT_ALIASES.get(act, act)
    if act not in HIDDEN_ACTS:
        raise read.unsupported("hidden_act", f"this activation is not supported; supported: {', '.join(HIDDEN_ACTS)}")
    return act


def _dtype(read: Reader) -> str:
    # transformers before 5 wrote torch_dtype; without either field its default is float32
    key = "dtype" if read.get("dtype") is not None else "torch_dtype"
    dtype = read.string(key, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise read.unsupported(key, f"this dtype is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _windows(read: Reader, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    full: tuple[int | None, ...] = (None,) * num_layers
    layer_types = read.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise read.error("layer_types", f"must list one type for each of the {num_layers} layers; correct the file")
        for name in layer_types:
            if name not in ("full_attention", "sliding_attention"):
                raise read.unsupported(
                    "layer_types", f"{name!r} is not supported; supported: full_attention, sliding_attention"
                )
        if "sliding_attention" not in layer_types:
            return full
        window = read.positive_int("sliding_window")
        return tuple(window if name == "sliding_attention" else None for name in layer_types)
    if model_type in ("qwen2", "qwen3", "mimo"):
        # Qwen's classes, and so MiMo's, ignore sliding_window unless the switch is on; the first layers have none then
        if not read.boolean("use_sliding_window", False):
            return full
        window, first = read.positive_int("sliding_window", 4096), read.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if model_type == "mistral":
        # an absent field means the class default, 4096 (v0.1); null means no window (v0.2 and later)
        if "sliding_window" in read.data and read.get("sliding_window") is None:
            return full
        return (read.positive_int("sliding_window", 4096),) * num_layers
    return full  # LlamaForCausalLM has no window, whatever its file says


def _rope(read: Reader, max_positions: int) -> RopeConfig:
    # as in transformers, a non-empty rope_scaling wins over rope_parameters
    key = "rope_scaling" if read.object("rope_scaling") else "rope_parameters"
    scaling = read.sub(key, _one_rope(read, key, read.object(key) or {}))
    kind_key = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.string(kind_key, "default")
    if kind not in ROPE_TYPES:
        raise scaling.unsupported(kind_key, f"this rope type is not supported; supported: {', '.join(ROPE_TYPES)}")
    for source in (scaling, read):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.unsupported("partial_rotary_factor", "only fully rotated heads (1.0) are supported")
    top_theta = read.number("rope_theta", 10_000.0, minimum=0.0)
    theta = scaling.number("rope_theta", top_theta, minimum=0.0)
    if kind == "default":
        return RopeConfig(theta=theta, original_max_position_embeddings=max_positions)
    original = max_positions
    if kind in ("llama3", "yarn"):
        inner = scaling.positive_int("original_max_position_embeddings", max_positions)
        original = read.positive_int("original_max_position_embeddings", inner)
    # only yarn may omit the factor, which then is the ratio of the two lengths
    factor = scaling.number("factor", max_positions / original if kind == "yarn" else None, minimum=0.0)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, factor, original)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor", minimum=0.0), scaling.number("high_freq_factor", minimum=0.0)
        if low == high:
            raise scaling.error("high_freq_factor", f"= {high:g} equals low_freq_factor; correct it in the file")
        return RopeConfig(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    mscale, mscale_all = scaling.optional_number("mscale"), scaling.optional_number("mscale_all_dim")
    attention_factor = scaling.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = _mscale(factor, 1.0)
        if mscale and mscale_all:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=scaling.optional_number("beta_fast") or 32.0,
        beta_slow=scaling.optional_number("beta_slow") or 1.0,
        mscale=mscale,
        mscale_all_dim=mscale_all,
        attention_factor=attention_factor,
        truncate=scaling.boolean("truncate", True),
    )


def _one_rope(read: Reader, key: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters of all layers. transformers 5 may nest them by layer type; only equal ones are supported."""
    nested = [value for value in scaling.values() if isinstance(value, dict)]
    if not nested:
        return scaling
    if any(value != nested[0] for value in scaling.values()):
        raise read.unsupported(key, "different rope parameters per layer type are not supported")
    return nested[0]


def _mscale(scale: float, mscale: float) -> float:
    """YaRN's attention temperature (eq. 22 of arXiv 2309.00071), with DeepSeek's multiplier."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _eos(read: Reader, vocab_size: int) -> frozenset[int]:
    value = read.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise read.error("eos_token_id", f"= {short(value)} is not a token id or a list of them; correct the file")
    # -1 means none, and an id outside the vocabulary can never be generated
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def _token_id(config: Reader, generation: Reader, key: str) -> int | None:
    for read in (config, generation):
        # some files write -1 for "none"; a list of several pad ids names no single id
        if read.get(key) is not None and not isinstance(read.get(key), list):
            token = read.integer(key)
            return token if token >= 0 else None
    return None


def _generation_defaults(read: Reader) -> Mapping[str, float | int]:
    values: dict[str, float | int] = {}
    if read.boolean("do_sample", False):
        for key, kind in _SAMPLING_KEYS.items():
            if read.get(key) is not None:
                values[key] = read.integer(key) if kind is int else read.number(key)
    if read.get("repetition_penalty") is not None:  # it applies to greedy decoding, too
        values["repetition_penalty"] = read.number("repetition_penalty", minimum=0.0)
    return values
