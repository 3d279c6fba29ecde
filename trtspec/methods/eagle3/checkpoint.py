"""What the config.json of an EAGLE or EAGLE3 head says beyond a decoder's: the public layouts, in their spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, UnsupportedError
from trtspec.methods.capture import capture_layers_from_vllm

EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3ForCausalLMEagle3")

# What vLLM calls heads for parallel drafting; others of them have a name of the above.
P_EAGLE_ARCHITECTURES = ("PeagleLlamaForCausalLM",)

# eagle_config switches whose other value is a head we do not run
_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
# norms before `fc`, which config.json speaks of at its top or in eagle_config
_NORMS_OF_STATES = ("norm_before_fc", "fc_norm")


@dataclass(frozen=True)
class EagleFacts:
    """Of a head of the original EAGLE. fc_bias: whether `fc` has a bias, None where config.json does not say; those who
    published the first heads then built one with a bias."""

    fc_bias: bool | None

    @staticmethod
    def is_named_in(config: ModelConfig) -> bool:
        """Whether its architecture says that it is such a head. Most public ones call themselves plain decoders."""
        return config.architecture.startswith("Eagle") and config.architecture not in EAGLE3_ARCHITECTURES

    @classmethod
    def of(cls, config: ModelConfig) -> EagleFacts:
        """Raises UnsupportedError for heads of another kind, CheckpointError for fields that make no sense."""
        if config.architecture in EAGLE3_ARCHITECTURES:
            raise UnsupportedError(
                f"draft model {config.path}: architecture {config.architecture!r} is an EAGLE3 head, method='eagle' "
                "runs those of the original EAGLE; use method='eagle3'"
            )
        _refuse_quantised(config, "EAGLE")
        for name, only in (("truncated_vocab_size", config.vocab_size), ("logit_scale", 1)):
            if config.raw.get(name) not in (None, only):
                raise UnsupportedError(
                    f"draft model {config.path}: {name} = {config.raw[name]!r} is not built; only {only} is"
                )
        for name in ("eagle_fc_bias", "bias"):  # vLLM's word, and the original's
            if config.raw.get(name) is not None:
                return cls(_switch(config, config.raw, name))
        return cls(None)


@dataclass(frozen=True)
class Eagle3Facts:
    """`capture_layers` are ids "after layer i", None where the checkpoint leaves the choice to the default."""

    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool
    capture_layers: tuple[int, ...] | None

    @classmethod
    def of(cls, config: ModelConfig, parallel: bool = False) -> Eagle3Facts:
        """parallel: of a P-EAGLE head. Raises UnsupportedError for heads of another kind, CheckpointError for fields
        that make no sense."""
        remedy = "" if parallel else "; P-EAGLE heads want parallel_drafting=True"
        supported = (*EAGLE3_ARCHITECTURES, *(P_EAGLE_ARCHITECTURES if parallel else ()))
        if config.architecture not in supported:
            raise UnsupportedError(
                f"draft model {config.path}: architecture {config.architecture!r} is no EAGLE3 head we run; supported: "
                f"{', '.join(supported)}{remedy}"
            )
        _refuse_quantised(config, "EAGLE3")
        raw, nested = config.raw, _nested(config)
        if config.num_layers != 1 and not parallel:
            raise UnsupportedError(
                f"draft model {config.path}: num_hidden_layers = {config.num_layers}; EAGLE3 heads of one layer run"
                f"{remedy}"
            )
        for name in _NORMS_OF_STATES:
            if nested.get(name, raw.get(name)) not in (None, False):
                raise UnsupportedError(
                    f"draft model {config.path}: {name} = {nested.get(name, raw.get(name))!r} is not built; only heads "
                    "that fuse the target's states as they are run"
                )
        for name, value in _FIXED.items():
            if nested.get(name, value) != value:
                raise UnsupportedError(
                    f"draft model {config.path}: eagle_config.{name} = {nested[name]!r} is not built; only {value!r} is"
                )
        size = _positive(config, raw, "draft_vocab_size", config.vocab_size)
        if size > config.vocab_size:
            raise CheckpointError(
                f"draft model {config.path}: draft_vocab_size = {size} exceeds vocab_size = {config.vocab_size}; "
                "correct config.json"
            )
        return cls(
            target_hidden_size=_positive(config, raw, "target_hidden_size", config.hidden_size),
            draft_vocab_size=size,
            norm_before_residual=_switch(config, raw, "norm_before_residual"),
            capture_layers=_capture_layers(config, nested),
        )


def _refuse_quantised(config: ModelConfig, kind: str) -> None:
    if config.quantization is not None:
        raise UnsupportedError(
            f"draft model {config.path}: {kind} heads of quantised weights ({config.quantization}) are not supported; "
            "use the bf16, fp16 or fp32 one, and quantization in speculative_config"
        )


def _nested(config: ModelConfig) -> Mapping[str, Any]:
    nested = config.raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"draft model {config.path}: field 'eagle_config' is not an object; correct config.json")
    return nested


def _capture_layers(config: ModelConfig, nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """From vLLM's ids, which every public checkpoint that says anything uses."""
    name = "eagle_aux_hidden_state_layer_ids"
    ids = nested.get(name, config.raw.get(name))
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 1 for i in ids):
        raise CheckpointError(
            f"draft model {config.path}: {name} = {ids!r} is not a list of layer numbers >= 1 (an id is the layer "
            "entered; 0, the embedding, is not captured); correct config.json"
        )
    return capture_layers_from_vllm(tuple(ids))


def _positive(config: ModelConfig, raw: Mapping[str, Any], name: str, default: int) -> int:
    value = default if raw.get(name) is None else raw[name]
    if type(value) is not int or value < 1:
        raise CheckpointError(f"draft model {config.path}: {name} = {value!r} is no size; correct config.json")
    return value


def _switch(config: ModelConfig, raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if type(value) is not bool:
        raise CheckpointError(f"draft model {config.path}: {name} = {value!r} is not true or false; correct it")
    return value
