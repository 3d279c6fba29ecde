"""SpeculativeConfig: the user's settings of speculation. Field names are vLLM's, old and new, and TensorRT-LLM's.

Rules for one field are at the field, and rules between fields are in `_consistent`. Rules that need the target or the
draft are in methods/planning.py.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WrapValidator, model_validator

from trtspec.config.base import JsonKey, StrictConfig, list_to_tuple, one_of, text_of_path
from trtspec.config.tree import parse_tree
from trtspec.errors import ConfigError
from trtspec.modes import METHODS

# vLLM's older names for single architectures, which all mean "mtp".
LEGACY_MTP_METHODS = (
    "deepseek_mtp",
    "mimo_mtp",
    "glm4_moe_mtp",
    "ernie_mtp",
    "qwen3_next_mtp",
    "longcat_flash_mtp",
    "pangu_ultra_moe_mtp",
)
REJECTION_METHODS = ("strict", "standard", "block", "synthetic")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")

AUTO_DRAFT_LEN = "auto"
"""num_speculative_tokens if the engine chooses the number of drafts of each step."""


def _count_or_auto(value: Any, count: Callable[[Any], int]) -> Any:
    return value if value == AUTO_DRAFT_LEN else count(value)


Count = Annotated[int, Field(ge=1)]
if TYPE_CHECKING:
    DraftLen = int | Literal["auto"]
else:  # errors are those of a number, not of each type of a union
    DraftLen = Annotated[Count, WrapValidator(_count_or_auto), PlainSerializer(lambda value: value, return_type=Any)]
Unit = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


def _method(name: str) -> str:
    if name == "[ngram]":  # vLLM's other spelling
        return "ngram"
    if name in LEGACY_MTP_METHODS:
        warnings.warn(f"method={name!r} is deprecated; use method='mtp'", DeprecationWarning, stacklevel=4)
        return "mtp"
    return one_of("method", METHODS)(name)


def _tree(text: str) -> str:
    parse_tree(text)
    return text


def _file_prefix(prefix: str) -> str:
    if not re.fullmatch(r"[\w.+-]+", prefix):
        raise ConfigError(f"file_prefix={prefix!r}: use letters, digits, and any of ._+-")
    return prefix


def _schedule(schedule: dict[int, int]) -> dict[int, int]:
    if not schedule or min(schedule) < 1 or min(schedule.values()) < 0:
        raise ConfigError(f"draft_len_schedule={schedule}: use {{batch size >= 1: draft length >= 0, ...}}")
    return dict(sorted(schedule.items()))


def _ranges(ranges: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    last = 0  # last batch size covered so far
    for start, end, k in ranges:
        if start <= last or end < start or k < 0 or (last == 0 and start != 1):
            raise ConfigError(
                f"num_speculative_tokens_per_batch_size={list(ranges)}: {(start, end, k)} is out of place; use "
                "inclusive (start, end, K) ranges that start at 1, are sorted and disjoint, with K >= 0"
            )
        last = end
    if not ranges:
        raise ConfigError("num_speculative_tokens_per_batch_size=[] is empty; leave it unset for a constant K")
    return ranges


def check_against_k(config: SpeculativeConfig, k: int) -> None:
    """Check the rules between K and other fields. Raises ConfigError."""
    schedule = config.draft_len_schedule
    if schedule is not None and (max(schedule.values()) > k or schedule[min(schedule)] != k):
        raise ConfigError(
            f"draft_len_schedule={schedule} does not fit num_speculative_tokens={k}: no length may exceed it and the "
            f"smallest key must map to it; use {{{min(schedule)}: {k}, ...}}"
        )
    rates, length = config.synthetic_acceptance_rates, config.synthetic_acceptance_length
    if rates is not None and len(rates) != k:
        raise ConfigError(f"synthetic_acceptance_rates={rates} needs num_speculative_tokens={k} entries; give {k}")
    if length is not None and length > k + 1:
        raise ConfigError(f"synthetic_acceptance_length={length} exceeds K+1; use a value in [1, {k + 1}]")


class SAEnhancerConfig(StrictConfig):
    """Lookups next to draft layers or a draft model, as TensorRT-LLM's config of this name describes them.

    If at least the last `threshold` tokens of a request occurred earlier in its text, it verifies what followed there.
    Otherwise it verifies the drafts of the model.
    """

    threshold: int = Field(default=4, ge=1, le=64, description="the fewest tokens that must match, at most 64")
    enable_global_pool: bool = Field(default=False, description="also look in the texts of other requests")


class SpeculativeConfig(StrictConfig):
    """The settings of speculation. All are optional except those that `method` needs.

    `plan_speculation` fills in the rest. Every method accepts strictly by default; vLLM's default, "standard", is
    rejection sampling. The constructor raises ConfigError for contradictory values. `plan_speculation` raises
    UnsupportedError for what is known but not built. `disable_padded_drafter_batch` has no effect: draft batches are
    always ragged, never padded.
    """

    num_speculative_tokens: DraftLen | None = Field(
        default=None,
        description="draft tokens per step, K; 'auto': as many as save time, none included; unset: what the method or "
        "its checkpoint implies, else 'auto'; to decode without speculation leave speculative_config unset",
    )
    model: Annotated[str | None, BeforeValidator(text_of_path)] = Field(
        default=None, description="of the draft: a checkpoint folder, GGUF file or name on the Hub"
    )
    method: Annotated[str, AfterValidator(_method)] | None = None
    one_engine: bool | None = Field(
        default=None, description="None: one-engine where a worker exists, except for draft_model"
    )
    vanilla: bool = Field(default=False, description="MTP with one module per draft step")
    revision: str | None = Field(default=None, description="branch, tag or commit of a model on the Hub")
    code_revision: str | None = None
    quantization: str | None = Field(default=None, description="of the draft's weights, its own lm_head included")
    enforce_eager: bool | None = Field(
        default=None, description="True: draft layers, and the launch that they are in, run without CUDA graphs"
    )
    draft_tensor_parallel_size: int | None = Field(default=None, ge=1, description="1, or the target's size")
    max_model_len: int | None = Field(default=None, ge=1, description="tokens; at most the draft's and the target's")
    disable_padded_drafter_batch: bool = False
    disable_logprobs: bool = Field(default=False, description="True: requests that ask for logprobs are refused")

    # draft length as a function of the number of running requests; the smallest that is given counts
    disable_by_batch_size: int | None = Field(default=None, ge=2, description="more requests draft nothing")
    draft_len_schedule: Annotated[dict[JsonKey, int], AfterValidator(_schedule)] | None = Field(
        default=None, description="{largest batch size: draft length}"
    )
    num_speculative_tokens_per_batch_size: (
        Annotated[tuple[tuple[int, int, int], ...], BeforeValidator(list_to_tuple), AfterValidator(_ranges)] | None
    ) = Field(default=None, description="inclusive ranges [(first batch size, last batch size, K), ...]")
    max_concurrency: int | None = Field(default=None, ge=1, description="more requests draft nothing")
    acceptance_window: int | None = Field(default=None, ge=1, description="finished requests in the rolling mean")
    acceptance_length_threshold: float | None = Field(default=None, ge=0.0, description="draft tokens per step")

    # n-gram
    prompt_lookup_min: int | None = Field(default=None, ge=1, description="shortest n-gram to match")
    prompt_lookup_max: int | None = Field(default=None, ge=1, description="longest n-gram to match")
    prompt_lookup_latest: bool = Field(default=False, description="take the latest match instead of the earliest")
    is_public_pool: bool | None = Field(
        default=None,
        description="look in a pool of earlier matches, one for all requests (True) or one for each (False); None: in "
        "the request's own tokens",
    )
    is_keep_all: bool = Field(default=True, description="False: the pool has one match for each n-gram")
    ngram_pool_size: Count = Field(default=200_000, description="matches in a pool; the oldest leave it")

    # suffix
    suffix_decoding_max_tree_depth: Count = 24
    suffix_decoding_max_cached_requests: int = Field(
        default=10000, ge=0, le=1_000_000, description="responses kept, 33 to 200 kB each; 0: none"
    )
    suffix_decoding_max_spec_factor: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    suffix_decoding_min_token_prob: Unit = 0.1

    sa_config: SAEnhancerConfig | None = Field(
        default=None,
        description="{'threshold': 4}: drafts are looked up where a request's text repeats itself; None: the draft "
        "layers or the draft model make them all",
    )

    # acceptance and drafting; draft_sample_method None draws drafts with the target's noise, so most are accepted
    rejection_sample_method: (
        Annotated[str, AfterValidator(one_of("rejection_sample_method", REJECTION_METHODS))] | None
    ) = None
    synthetic_acceptance_rates: Annotated[tuple[Unit, ...], BeforeValidator(list_to_tuple)] | None = None
    synthetic_acceptance_length: float | None = Field(
        default=None, ge=1.0, allow_inf_nan=False, description="in [1, K+1]"
    )
    draft_sample_method: Annotated[str, AfterValidator(one_of("draft_sample_method", DRAFT_SAMPLE_METHODS))] | None = (
        None
    )
    speculative_token_tree: Annotated[str, AfterValidator(_tree)] | None = None
    max_total_draft_tokens: int | None = Field(
        default=None, ge=1, description="nodes of a draft tree that each step shapes; None: no such tree"
    )
    dynamic_tree_max_topK: int | None = Field(
        default=None, ge=1, description="children of a node, and nodes of a depth that have any, in such a tree"
    )
    use_heterogeneous_vocab: bool = Field(
        default=False, description="the draft model has a tokenizer of its own; the tokens of both are drafted"
    )
    draft_confidence_threshold: Unit | None = Field(
        default=None,
        description="drafts are verified up to the first that the draft layers hold to be accepted with less "
        "probability; None: all are",
    )
    parallel_drafting: bool = False
    enable_adaptive_verification: bool = Field(
        default=False, description="num_speculative_tokens is the most; each step chooses how many, as with 'auto'"
    )

    # EAGLE3 and hidden-state capture: "after layer i", -1 = after the final norm. These are TensorRT-LLM's ids; vLLM's
    # are one higher.
    capture_layers: Annotated[tuple[Annotated[int, Field(ge=-1)], ...], BeforeValidator(list_to_tuple)] | None = None
    # extract_hidden_states: files for the target's hidden states of finished requests (engine/hidden_states.py)
    output_directory: str | None = Field(default=None, description="folder of the shards; may hold earlier ones")
    write_interval: Count = Field(default=20, description="finished requests per file")
    file_prefix: Annotated[str, AfterValidator(_file_prefix)] = Field(default="data", description="of file names")
    # custom_class: "module:Class", a class, or an instance
    drafter: Any = None

    @model_validator(mode="after")
    def _consistent(self) -> SpeculativeConfig:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise ConfigError(f"prompt_lookup_min={low} exceeds prompt_lookup_max={high}; lower it to at most {high}")
        if self.is_public_pool is None:
            for field in ("is_keep_all", "ngram_pool_size"):
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise ConfigError(
                        f"{field}={getattr(self, field)!r} without a pool; set is_public_pool to True or False, or "
                        f"remove {field}"
                    )
        if self.draft_len_schedule is not None and self.max_concurrency is not None:
            raise ConfigError(
                f"draft_len_schedule={self.draft_len_schedule} and max_concurrency={self.max_concurrency} exclude each "
                "other; keep one (a schedule gives K=0 above its largest key)"
            )
        if (self.acceptance_window is None) != (self.acceptance_length_threshold is None):
            raise ConfigError(
                f"acceptance_window={self.acceptance_window} and acceptance_length_threshold="
                f"{self.acceptance_length_threshold} belong together; set both or neither"
            )
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        given = (rates is not None) + (length is not None)
        if given != (self.rejection_sample_method == "synthetic"):
            raise ConfigError(
                f"synthetic_acceptance_rates={rates}, synthetic_acceptance_length={length} with "
                f"rejection_sample_method={self.rejection_sample_method!r}: set exactly one of "
                "them with 'synthetic', and neither otherwise"
            )
        if rates is not None and any(a < b for a, b in itertools.pairwise(rates)):
            raise ConfigError(f"synthetic_acceptance_rates={rates} increase; each must be at most the one before")
        if self.method == "custom_class" and self.drafter is None:
            raise ConfigError("drafter=None with method='custom_class'; set drafter='module:Class' or an object")
        if self.method == "extract_hidden_states" and self.output_directory is None:
            raise ConfigError("output_directory=None with method='extract_hidden_states'; set it to a folder")
        if self.speculative_token_tree is not None and self.max_total_draft_tokens is not None:
            raise ConfigError(
                f"speculative_token_tree={self.speculative_token_tree!r} has one shape, and a tree of "
                f"max_total_draft_tokens={self.max_total_draft_tokens} nodes has many; leave one of them unset"
            )
        if self.dynamic_tree_max_topK is not None and self.max_total_draft_tokens is None:
            raise ConfigError(
                f"dynamic_tree_max_topK={self.dynamic_tree_max_topK} is of trees whose number of nodes is missing; set "
                "max_total_draft_tokens"
            )
        if isinstance(self.draft_depth, int):
            check_against_k(self, self.draft_depth)
        elif self.num_speculative_tokens is not None and self.speculative_token_tree is not None:
            raise ConfigError(
                f"speculative_token_tree={self.speculative_token_tree!r} has one size, and "
                "num_speculative_tokens='auto' has none; leave one of them unset"
            )
        if self.enable_adaptive_verification and self.speculative_token_tree is not None:
            raise ConfigError(
                f"speculative_token_tree={self.speculative_token_tree!r} has one size, and "
                "enable_adaptive_verification=True has many; leave one of them unset"
            )
        return self

    @property
    def draft_depth(self) -> int | str | None:
        """num_speculative_tokens, or the tree's depth if that is not set, or is the number of the tree's nodes.

        vLLM counts the nodes.
        """
        k = self.num_speculative_tokens
        if self.speculative_token_tree is None:
            return k
        tree = parse_tree(self.speculative_token_tree)
        return len(tree[-1]) if k in (None, len(tree)) else k

    @property
    def choosing_settings(self) -> str:
        """The settings that let the engine choose the number of drafts, in words."""
        adaptive = ["enable_adaptive_verification=True"] if self.enable_adaptive_verification else []
        auto = ["num_speculative_tokens='auto'"] if self.draft_depth == AUTO_DRAFT_LEN or not adaptive else []
        return " and ".join(auto + adaptive)

    @property
    def fixing_advice(self) -> str:
        """What to do so that the number of drafts is fixed, in words."""
        number = [] if isinstance(self.draft_depth, int) else ["set num_speculative_tokens to a number, 3 for a start"]
        flag = ["leave enable_adaptive_verification unset"] if self.enable_adaptive_verification else []
        return " and ".join(number + flag)

    def __repr__(self) -> str:
        model = None if self.method in ("ngram", "suffix") else self.model
        k = self.num_speculative_tokens
        return f"SpeculativeConfig(method={self.method!r}, model={model!r}, num_spec_tokens={k!r})"

    __str__ = __repr__
