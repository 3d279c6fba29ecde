"""TensorRT-LLM's decoding configs, with their own names and defaults. Each converts to a SpeculativeConfig.

A field whose feature is not built may keep its default. Another value raises UnsupportedError on conversion. No value
is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from trtspec.config.base import JsonKey, StrictConfig, one_of, refuse_unbuilt, text_of_path
from trtspec.config.speculative import SAEnhancerConfig, SpeculativeConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.interop.decoding_fields import Choices, Layers, LayerSet, tree_fields
from trtspec.modes import METHODS

logger = logging.getLogger(__name__)

ADVANCED_SAMPLING_MODES = ("full", "no_topk", "no_topp", "no_topk_no_topp", "universal")


class DecodingBaseConfig(StrictConfig):
    """The fields of all decoding configs. `speculative_model_dir` is another name for `speculative_model`.

    `allow_advanced_sampling` changes nothing here: every request's own sampling parameters are always applied.
    """

    model_config = ConfigDict(populate_by_name=True)

    decoding_type: ClassVar[str] = ""  # TensorRT-LLM's name in YAML files
    method: ClassVar[str] = ""  # trtspec's name
    # field -> remedy for a value other than its default
    unbuilt: ClassVar[Mapping[str, str]] = {
        "acceptance_window": "leave it unset, or use max_concurrency",
        "acceptance_length_threshold": "leave it unset, or use max_concurrency",
        "use_rejection_sampling": "leave it False: strict acceptance loses nothing",
        "advanced_sampling_mode": "leave it 'full'",
    }

    max_draft_len: int | None = Field(default=None, ge=1, description="draft tokens per step, K")
    max_total_draft_tokens: int | None = Field(default=None, ge=1, description="nodes of the draft tree; K for a chain")
    speculative_model: Annotated[str | None, BeforeValidator(text_of_path)] = Field(
        default=None, alias="speculative_model_dir", description="draft folder"
    )
    max_concurrency: int | None = Field(default=None, ge=1)
    draft_len_schedule: dict[JsonKey, int] | None = None
    acceptance_window: int | None = Field(default=None, ge=0, description="0: off")
    acceptance_length_threshold: float | None = Field(default=None, ge=0.0)
    use_rejection_sampling: bool = False
    allow_advanced_sampling: bool = False
    advanced_sampling_mode: Annotated[
        str, AfterValidator(one_of("advanced_sampling_mode", ADVANCED_SAMPLING_MODES))
    ] = "full"

    def to_speculative_config(self) -> SpeculativeConfig:
        """The same settings as a SpeculativeConfig. Raises ConfigError or UnsupportedError."""
        name = type(self).__name__
        fields = type(self).model_fields
        remedies = {**DecodingBaseConfig.unbuilt, **self.unbuilt}
        allowed: dict[str, tuple[Any, ...]] = {f: (fields[f].default,) for f in remedies}
        allowed["acceptance_window"] = (None, 0)
        refuse_unbuilt(f"{name}.", dict(self), {f: (allowed[f], text) for f, text in remedies.items()})
        if self.method not in METHODS:
            raise UnsupportedError(
                f"{name}: decoding_type={self.decoding_type!r} is not built yet; use NGramDecodingConfig"
            )
        if self.max_total_draft_tokens not in (None, self._num_nodes or self.max_draft_len):
            raise ConfigError(
                f"{name}.max_total_draft_tokens={self.max_total_draft_tokens} with max_draft_len={self.max_draft_len} "
                "is a tree; give its paths (eagle_choices, medusa_choices) or use_dynamic_tree=True of EAGLE3, or "
                "leave it unset for a chain"
            )
        return SpeculativeConfig(
            **{
                "method": self.method,
                "num_speculative_tokens": self.max_draft_len,
                "model": self.speculative_model,
                "max_concurrency": self.max_concurrency,
                "draft_len_schedule": self.draft_len_schedule,
                **self._own_fields(),
            }
        )

    @property
    def _num_nodes(self) -> int | None:
        """Number of nodes of the tree that is given, or of a chain whose K has another name; None = neither is."""
        return None

    def _own_fields(self) -> dict[str, Any]:
        """Fields of SpeculativeConfig that only this kind of config sets."""
        return {}


class Eagle3DecodingConfig(DecodingBaseConfig):
    """EAGLE3, one-engine unless eagle3_one_model is False. Layer ids mean "after layer i", as in all of trtspec."""

    decoding_type: ClassVar[str] = "Eagle3"
    method: ClassVar[str] = "eagle3"
    unbuilt: ClassVar[Mapping[str, str]] = {
        "eagle3_model_arch": "leave it 'llama3'",
        "greedy_sampling": "leave it True: requests are sampled as they ask",
        "posterior_threshold": "leave it unset for strict acceptance",
        "num_eagle_layers": "leave it unset: the checkpoint says",
        "max_non_leaves_per_layer": "leave it unset for a chain",
    }

    eagle3_one_model: bool = True
    eagle3_layers_to_capture: LayerSet | None = None
    eagle3_model_arch: str = "llama3"
    eagle_choices: Choices | None = None
    greedy_sampling: bool = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = Field(default=None, ge=1, description="1 is a chain")
    num_eagle_layers: int | None = Field(default=None, ge=1)
    max_non_leaves_per_layer: int | None = Field(default=None, ge=1)
    sa_config: SAEnhancerConfig | None = None

    @model_validator(mode="after")
    def _tree_fits(self) -> Eagle3DecodingConfig:
        top_k, depth, total = self.dynamic_tree_max_topK, self.max_draft_len, self.max_total_draft_tokens
        if not self.use_dynamic_tree or top_k is None or depth is None or total is None:
            return self
        if not depth <= total <= top_k * depth:
            raise ConfigError(
                f"max_total_draft_tokens={total} with max_draft_len={depth}, dynamic_tree_max_topK={top_k}; use a "
                f"value in [{depth}, {top_k * depth}]"
            )
        return self

    def _own_fields(self) -> dict[str, Any]:
        own = {
            "one_engine": self.eagle3_one_model,
            "capture_layers": self.eagle3_layers_to_capture,
            "sa_config": self.sa_config,
        }
        if not self.use_dynamic_tree:
            if self.dynamic_tree_max_topK not in (None, 1):
                raise ConfigError(
                    f"dynamic_tree_max_topK={self.dynamic_tree_max_topK} without use_dynamic_tree; set that to True, "
                    "or leave both unset for a chain"
                )
            return own | tree_fields("eagle_choices", self.eagle_choices, self.max_draft_len)
        if self.dynamic_tree_max_topK is None or self.max_draft_len is None or self.eagle_choices is not None:
            raise ConfigError(
                f"use_dynamic_tree=True with dynamic_tree_max_topK={self.dynamic_tree_max_topK}, max_draft_len="
                f"{self.max_draft_len}, eagle_choices={self.eagle_choices}; set the first two and not the last"
            )
        return own | {
            "dynamic_tree_max_topK": self.dynamic_tree_max_topK,
            "max_total_draft_tokens": self.max_total_draft_tokens or self.dynamic_tree_max_topK * self.max_draft_len,
        }

    @property
    def _num_nodes(self) -> int | None:
        if self.use_dynamic_tree:
            return self.max_total_draft_tokens
        return None if self.eagle_choices is None else len(self.eagle_choices)


class MTPDecodingConfig(DecodingBaseConfig):
    """MTP. num_nextn_predict_layers is the older name of max_draft_len. If both are unset, the checkpoint decides."""

    decoding_type: ClassVar[str] = "MTP"
    method: ClassVar[str] = "mtp"
    unbuilt: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "use_relaxed_acceptance_for_thinking",
            "relaxed_topk",
            "relaxed_delta",
            "begin_thinking_phase_token",
            "end_thinking_phase_token",
        ),
        "leave it unset for strict acceptance",
    )

    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = Field(default=1, ge=1)
    relaxed_delta: float = Field(default=0.0, ge=0.0)
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    num_nextn_predict_layers: int | None = Field(default=None, ge=1)
    begin_thinking_phase_token: int = 128798
    end_thinking_phase_token: int = 128799
    sa_config: SAEnhancerConfig | None = None

    @property
    def _num_nodes(self) -> int | None:
        return self.num_nextn_predict_layers

    def _own_fields(self) -> dict[str, Any]:
        layers, k = self.num_nextn_predict_layers, self.max_draft_len
        if layers is not None and k is not None and layers != k:
            raise ConfigError(f"num_nextn_predict_layers={layers} and max_draft_len={k} differ; set max_draft_len only")
        return {
            "one_engine": self.use_mtp_vanilla or self.mtp_eagle_one_model,  # vanilla exists only as one engine
            "vanilla": self.use_mtp_vanilla,
            "num_speculative_tokens": k or layers,
            "sa_config": self.sa_config,
        }


class NGramDecodingConfig(DecodingBaseConfig):
    """N-gram speculation with a pool of matches. All requests share one pool unless is_public_pool is False."""

    decoding_type: ClassVar[str] = "NGram"
    method: ClassVar[str] = "ngram"

    max_matching_ngram_size: int = Field(default=2, ge=1)
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True

    def _own_fields(self) -> dict[str, Any]:
        return {
            "prompt_lookup_min": 1,
            "prompt_lookup_max": self.max_matching_ngram_size,
            "prompt_lookup_latest": not self.is_use_oldest,
            "is_public_pool": self.is_public_pool,
            "is_keep_all": self.is_keep_all,
        }


class DraftTargetDecodingConfig(DecodingBaseConfig):
    """A smaller model of the same vocabulary that drafts next to the target."""

    decoding_type: ClassVar[str] = "Draft_Target"
    method: ClassVar[str] = "draft_model"


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """A drafter of your own: "module:Class", a class or an object that follows trtspec.protocols.Drafter."""

    decoding_type: ClassVar[str] = "User_Provided"
    method: ClassVar[str] = "custom_class"
    unbuilt: ClassVar[Mapping[str, str]] = {"resource_manager": "keep the drafter's state in the drafter"}

    drafter: Any = None
    resource_manager: Any = None

    def _own_fields(self) -> dict[str, Any]:
        return {"drafter": self.drafter}


class AutoDecodingConfig(DecodingBaseConfig):
    """N-gram speculation with K, n and max_concurrency chosen from the batch size."""

    decoding_type: ClassVar[str] = "AUTO"
    method: ClassVar[str] = "auto"


class SaveHiddenStatesDecodingConfig(DecodingBaseConfig):
    """Capture of the target's hidden states in files, to train drafts. Nothing is drafted, whatever max_draft_len says.

    Layer ids mean "after layer i", -1 after the last norm, as in all of trtspec. Unset means EAGLE3's three.
    """

    decoding_type: ClassVar[str] = "SaveState"
    method: ClassVar[str] = "extract_hidden_states"

    output_directory: str
    write_interval: int = Field(default=20, ge=1, description="requests per file")
    file_prefix: str = "data"
    eagle3_layers_to_capture: LayerSet | None = None

    def _own_fields(self) -> dict[str, Any]:
        return {
            "output_directory": self.output_directory,
            "write_interval": self.write_interval,
            "file_prefix": self.file_prefix,
            "capture_layers": self.eagle3_layers_to_capture,
        }


class MedusaDecodingConfig(DecodingBaseConfig):
    """Medusa heads. max_draft_len, medusa_choices or num_medusa_heads sets their number.

    If all of these are unset, all heads of the checkpoint draft. Acceptance is strict as everywhere, not TensorRT-LLM's
    typical acceptance.
    """

    decoding_type: ClassVar[str] = "Medusa"
    method: ClassVar[str] = "medusa"

    medusa_choices: Choices | None = None
    num_medusa_heads: int | None = Field(default=None, ge=1)

    def _own_fields(self) -> dict[str, Any]:
        heads, tree = self.num_medusa_heads, tree_fields("medusa_choices", self.medusa_choices, self.max_draft_len)
        k = tree.get("num_speculative_tokens", self.max_draft_len)
        if heads is not None and k is not None and k > heads:
            raise ConfigError(f"{k} drafts exceed num_medusa_heads={heads}, each of which drafts one token; lower K")
        return {"num_speculative_tokens": k or heads, **tree}

    @property
    def _num_nodes(self) -> int | None:
        return self.max_draft_len or self.num_medusa_heads if self.medusa_choices is None else len(self.medusa_choices)


class SADecodingConfig(DecodingBaseConfig):
    """Suffix automaton. It is known, but not built."""

    decoding_type: ClassVar[str] = "SA"

    max_matching_ngram_size: int = Field(default=-1, ge=-1, description="-1: no limit")
    enable_global_pool: bool = False
    global_pool_size: int | None = Field(default=None, ge=1)


class _ParallelDecodingConfig(DecodingBaseConfig):
    """Drafting in one pass over mask tokens. target_layer_ids mean "after layer i"."""

    unbuilt: ClassVar[Mapping[str, str]] = {"mask_token_id": "leave it unset: the draft's config.json says"}

    mask_token_id: int | None = Field(default=None, ge=0)
    target_layer_ids: Layers | None = None

    def _own_fields(self) -> dict[str, Any]:
        return {"capture_layers": self.target_layer_ids}


class PARDDecodingConfig(_ParallelDecodingConfig):
    """PARD: a smaller model of the same vocabulary drafts in one pass over mask tokens."""

    decoding_type: ClassVar[str] = "PARD"
    method: ClassVar[str] = "draft_model"
    unbuilt: ClassVar[Mapping[str, str]] = {
        "mask_token_id": "leave it unset: the draft's config.json says (pard_token)",
        "target_layer_ids": "leave it unset: PARD reads tokens alone",
    }

    sa_config: SAEnhancerConfig | None = None

    def _own_fields(self) -> dict[str, Any]:
        return {"parallel_drafting": True, "sa_config": self.sa_config}


class DFlashDecodingConfig(_ParallelDecodingConfig):
    """DFlash: a block of mask tokens that reads the target's hidden states."""

    decoding_type: ClassVar[str] = "DFlash"
    method: ClassVar[str] = "dflash"


class DSparkDecodingConfig(_ParallelDecodingConfig):
    """DSpark: a DFlash block whose drafts each depend on the draft before."""

    decoding_type: ClassVar[str] = "DSpark"
    method: ClassVar[str] = "dspark"


DECODING_CONFIGS: tuple[type[DecodingBaseConfig], ...] = (
    Eagle3DecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    DraftTargetDecodingConfig,
    UserProvidedDecodingConfig,
    AutoDecodingConfig,
    SaveHiddenStatesDecodingConfig,
    MedusaDecodingConfig,
    SADecodingConfig,
    PARDDecodingConfig,
    DFlashDecodingConfig,
    DSparkDecodingConfig,
)


def _plain_name(kind: str) -> str:
    return kind.replace("_", "").lower()


def decoding_config_from_dict(fields: Mapping[str, Any]) -> DecodingBaseConfig:
    """{"decoding_type": "NGram", ...} -> NGramDecodingConfig(...). Raises ConfigError.

    The type's name may be in any case, and with or without "_". "Eagle" means Eagle3, with a warning.
    """
    kind = fields.get("decoding_type")
    name = _plain_name(str(kind))
    if name == "eagle":
        logger.warning("decoding_type=%r means Eagle3, as in TensorRT-LLM; for an EAGLE head use method='eagle'", kind)
        name = "eagle3"
    for cls in DECODING_CONFIGS:
        if name == _plain_name(cls.decoding_type):
            return cls(**{name: value for name, value in fields.items() if name != "decoding_type"})
    known = ", ".join(cls.decoding_type for cls in DECODING_CONFIGS)
    raise ConfigError(f"decoding_type={kind!r} is unknown; use one of {known}")
