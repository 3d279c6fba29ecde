"""The fields in config.json of an EAGLE3 head beyond a decoder's, in the spellings of the public layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.config.checkpoint.folder import CheckpointConfig, architecture_of
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.speculation_plan import DraftInfo, TargetInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import CheckpointError, ConfigError, UnsupportedError
from trtspec.methods.capture import capture_layers_from_vllm
from trtspec.methods.mask_token import mask_token_id
from trtspec.models.specs import ARCHITECTURES

EAGLE3 = "eagle3"
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3ForCausalLMEagle3")

# vLLM's name for heads for parallel drafting; other such heads have one of the names above.
P_EAGLE_ARCHITECTURES = ("PeagleLlamaForCausalLM",)

# Targets, by parts of their model_type, whose residual stream is known to be captured as EAGLE3 drafts expect.
EAGLE3_TARGETS = ("llama", "qwen", "minicpm", "gpt_oss")

# eagle_config switches and the one value that runs; a head with another value is not supported
_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True)
class Eagle3HeadConfig:
    """The config of an EAGLE3 or P-EAGLE head.

    norm_before_fc: a norm of all captured states of a row as one vector. fc_norm: a norm of each captured state by
    itself. norm_output: a pass reads the normed output of the previous pass. capture_layers: ids "after layer i", None
    where the checkpoint leaves the choice to the default.
    """

    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    capture_layers: tuple[int, ...] | None

    @classmethod
    def of(cls, config: ModelConfig, parallel: bool = False) -> Eagle3HeadConfig:
        """Read the config. Raises UnsupportedError for heads of another kind, CheckpointError for invalid fields.

        parallel: the head is a P-EAGLE head.
        """
        remedy = "" if parallel else "; P-EAGLE heads want parallel_drafting=True"
        supported = (*EAGLE3_ARCHITECTURES, *(P_EAGLE_ARCHITECTURES if parallel else ()))
        if config.architecture not in supported:
            raise UnsupportedError(
                f"draft model {config.path}: architecture {config.architecture!r} is no EAGLE3 head we run; supported: "
                f"{', '.join(supported)}{remedy}"
            )
        raw, nested = config.raw, _nested(config)
        if config.num_layers != 1 and not parallel:
            raise UnsupportedError(
                f"draft model {config.path}: num_hidden_layers = {config.num_layers}; EAGLE3 heads of one layer run"
                f"{remedy}"
            )
        norms = {name: switch(config, {**raw, **nested}, name) for name in ("norm_before_fc", "fc_norm", "norm_output")}
        if norms["norm_before_fc"] and norms["fc_norm"]:
            raise CheckpointError(
                f"draft model {config.path}: norm_before_fc and fc_norm exclude each other; correct config.json"
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
            norm_before_residual=switch(config, raw, "norm_before_residual"),
            **norms,
            capture_layers=_capture_layers(config, nested),
        )


def _nested(config: ModelConfig) -> Mapping[str, Any]:
    nested = config.raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"draft model {config.path}: field 'eagle_config' is not an object; correct config.json")
    return nested


def _capture_layers(config: ModelConfig, nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the layers that config.json names as "after layer i", ascending: their states are concatenated so.

    Ids are vLLM's. But those in eagle_config whose lowest is 1 are ModelOpt's, which are "after layer i" already. No
    head of vLLM's ids reads what enters layer 1 (sgl-project/sglang#25454).
    """
    name = "eagle_aux_hidden_state_layer_ids"
    ids = nested.get(name, config.raw.get(name))
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 1 for i in ids):
        raise CheckpointError(
            f"draft model {config.path}: {name} = {ids!r} is not a list of layer numbers >= 1 (an id is the layer "
            "entered; 0, the embedding, is not captured); correct config.json"
        )
    ids = tuple(sorted(ids))
    return ids if name in nested and ids[0] == 1 else capture_layers_from_vllm(ids)


def _positive(config: ModelConfig, raw: Mapping[str, Any], name: str, default: int) -> int:
    value = default if raw.get(name) is None else raw[name]
    if type(value) is not int or value < 1:
        raise CheckpointError(f"draft model {config.path}: {name} = {value!r} is no size; correct config.json")
    return value


def switch(config: ModelConfig, raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if type(value) is not bool:
        raise CheckpointError(f"draft model {config.path}: {name} = {value!r} is not true or false; correct it")
    return value


def is_eagle3(architecture: str) -> bool:
    """Whether the architecture names an EAGLE3 or P-EAGLE head, whether it runs here or not."""
    return architecture.startswith("Eagle3") or architecture in (*EAGLE3_ARCHITECTURES, *P_EAGLE_ARCHITECTURES)


def recognises(checkpoint: CheckpointConfig) -> bool:
    """Whether the checkpoint's architecture is that of an EAGLE3 or P-EAGLE head."""
    return is_eagle3(architecture_of(checkpoint))


def read(checkpoint: CheckpointConfig, config: SpeculativeConfig) -> DraftInfo:
    """Return the facts about the head that planning needs. Raises as Eagle3HeadConfig.of does."""
    model, parallel = ModelConfig.of(checkpoint, "draft"), config.parallel_drafting
    return DraftInfo(
        method=EAGLE3,
        vocab_size=model.vocab_size,
        max_model_len=model.max_seq_len,
        capture_layers=Eagle3HeadConfig.of(model, parallel).capture_layers,
        mask_token_id=mask_token_id(model) if parallel else None,
        checkpoint=model,
    )


def check_target(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None) -> None:
    """Raise ConfigError for a target whose states no EAGLE3 head reads."""
    check_family(target.model_type)


def check_family(model_type: str) -> None:
    """Raise ConfigError for the model_type of a target whose states no EAGLE3 head reads."""
    if not any(kind in model_type for kind in EAGLE3_TARGETS):
        families = [name.removesuffix("ForCausalLM").lower() for name in ARCHITECTURES]
        loadable = [name for name in families if any(kind in name for kind in EAGLE3_TARGETS)]
        raise ConfigError(
            f"method='eagle3' with a target of model_type={model_type!r}; use a target of " + ", ".join(loadable)
        )
