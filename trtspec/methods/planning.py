"""Turns the user's SpeculativeConfig into a SpeculationPlan.

`choose` selects the method, and `plan_speculation` decides the rest. The rows of methods/table.py hold the differences
between methods. Decisions are made in vLLM's order.
"""

from __future__ import annotations

import warnings
from pathlib import PurePath
from typing import Any, cast

from trtspec.config.base import refuse_unbuilt
from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.config.engine import QUANTIZATIONS
from trtspec.config.speculation_plan import DraftInfo, SpeculationPlan, TargetInfo
from trtspec.config.speculative import AUTO_DRAFT_LEN, SpeculativeConfig, check_against_k
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.methods.mask_token import MASK_TOKEN_KEYS
from trtspec.methods.options import MethodOptions
from trtspec.methods.planned_tree import check_tree, plan_dynamic_tree, plan_tree
from trtspec.methods.table import METHODS, Method
from trtspec.modes import SpeculativeDecodingMode, select_mode

# field -> (values that run today, advice for any other value)
_BUILT: dict[str, tuple[tuple[Any, ...], str]] = {
    "code_revision": ((None,), "no code is loaded from checkpoints: leave it unset"),
    "draft_tensor_parallel_size": ((None, 1), "use 1"),
    "rejection_sample_method": ((None, "strict"), "leave it unset for strict acceptance, which loses nothing"),
    "draft_sample_method": ((None, "greedy"), "leave it unset"),
    "acceptance_window": ((None,), "leave it unset, or use max_concurrency"),
}


# Fields that vLLM ignores where the method does not read them, so configurations combine them with any method.
_IGNORED = ("prompt_lookup_min", "prompt_lookup_max")


def recognise(checkpoint: CheckpointConfig) -> Method:
    """Return the method that a draft checkpoint is for.

    The criteria are, in order: the kind of checkpoint, its folder's name, and whether its family has MTP layers. A
    checkpoint that meets none of them is a draft model.
    """
    rows = METHODS.values()
    for row in rows:
        if row.recognises is not None and not row.of_target and row.recognises.open()(checkpoint):
            return row
    return _by_name(str(checkpoint.path)) or next(
        (row for row in rows if row.of_target and row.recognises is not None and row.recognises.open()(checkpoint)),
        METHODS["draft_model"],
    )


def _by_name(model: str) -> Method | None:
    name = PurePath(model).name.lower()  # only the folder's own name: a parent folder says nothing about a model
    return next((row for row in METHODS.values() if any(hint in name for hint in row.folder_hints)), None)


def settle(config: SpeculativeConfig) -> tuple[Method | None, str | None]:
    """Return the part of `choose` that the user's config alone decides: the method and its checkpoint folder.

    The method is None where the checkpoint decides it. The folder is None where no model is named. For a method without
    a checkpoint, a model that is only the method's own name counts as none, as in vLLM.

    Raises ConfigError where another model is set for a method that has no checkpoint.
    """
    method, model = config.method, config.model
    if method is None and model not in ("ngram", "[ngram]"):
        return None, model
    row = METHODS[method or "ngram"]
    if row.checkpoint is not None or method == "custom_class" or model is None:
        return row, model
    if model not in (row.name, f"[{row.name}]"):
        raise ConfigError(f"model={model!r} means nothing to method={method!r}; remove it")
    return row, None


def choose(config: SpeculativeConfig, draft: DraftInfo | None) -> tuple[Method, str | None]:
    """Return the method and the folder of its draft checkpoint, if it is to have one.

    An explicit method wins over any hint. Raises ConfigError where a model is missing, or is set for a method that has
    none.
    """
    row, model = settle(config)
    if row is not None and (model is not None or row.checkpoint is None or row.of_target):
        return row, model
    if model is None:
        if config.num_speculative_tokens is not None:
            raise ConfigError(
                "num_speculative_tokens was provided but without speculative model. "
                f"(method={config.method!r}, model=None: set model to a draft checkpoint, or method='ngram')"
            )
        raise ConfigError(f"method={config.method!r}, model=None: set model to a draft checkpoint, or method='ngram'")
    return METHODS[draft.method] if draft is not None else _by_name(model) or METHODS["draft_model"], model


def plan_speculation(
    config: SpeculativeConfig,
    target: TargetInfo,
    draft: DraftInfo | None = None,
    target_quantization: CheckpointQuantization | None = None,
) -> SpeculationPlan:
    """Return the plan for this target and this draft checkpoint.

    target_quantization: how the target's checkpoint is quantised, including the draft layers in it. Raises ConfigError
    where the config contradicts itself, the target or the draft; UnsupportedError for features that are not built.
    """
    spec_plan = plan_unchecked(config, target, draft)
    own = None if draft is None else draft.checkpoint
    _check_quantization(config, target_quantization if own is None else own.quantization)
    refuse_unbuilt("", dict(config), _BUILT)
    if spec_plan.mode.has_draft_model() and spec_plan.draft_tensor_parallel_size > 1:
        raise UnsupportedError(
            f"draft_tensor_parallel_size={spec_plan.draft_tensor_parallel_size} (the target's) is not built yet; use 1"
        )
    if spec_plan.draft_confidence_threshold is not None and spec_plan.mode is SpeculativeDecodingMode.DRAFT_TARGET:
        raise UnsupportedError(
            f"draft_confidence_threshold={spec_plan.draft_confidence_threshold} with a draft model in an engine of its "
            "own is not built yet; leave it unset, or use one_engine=True for a draft of the target's vocabulary"
        )
    if spec_plan.chooses_draft_len and spec_plan.draft_confidence_threshold is not None:
        raise UnsupportedError(
            f"draft_confidence_threshold={spec_plan.draft_confidence_threshold} with {config.choosing_settings} is not "
            f"built yet; leave draft_confidence_threshold unset, or {config.fixing_advice}"
        )
    if config.sa_config is not None and config.sa_config.enable_global_pool:
        raise UnsupportedError(
            "sa_config.enable_global_pool=True: lookups in the texts of other requests are not built next to draft "
            "layers; leave it False, or use method='suffix'"
        )
    if spec_plan.tree is not None:
        check_tree(config, spec_plan)
    return spec_plan


def _check_quantization(config: SpeculativeConfig, found: CheckpointQuantization | None) -> None:
    """Raise UnsupportedError for a quantisation that is not made here, unless the draft's layers already have it.

    found: the quantisation of the checkpoint that contains the draft's layers.
    """
    if config.quantization in QUANTIZATIONS:
        return
    if found is None or config.quantization not in found.names:
        there = "floating-point" if found is None else f"quantised by {found}"
        raise UnsupportedError(
            f"quantization={config.quantization!r}: the draft's weights are {there}, and are not quantised so here; "
            "use int8, int4, int4_g64 or int4_g128, or leave it unset"
        )


def plan_unchecked(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None = None) -> SpeculationPlan:
    """Plan everything, including features that are not built.

    Raises ConfigError. Raises UnsupportedError only where no mode exists for the request.
    """
    row, model = choose(config, draft)
    if row.checkpoint is None:
        draft = None
    check_fields(config, row)
    if row.check is not None:
        row.check.open()(config, target, draft)
    if row.substitute is not None:
        config = row.substitute.open()(config, target.max_batch_size)
        row, model = choose(config, draft)
    n_predict = None if draft is None else draft.n_predict
    inside = row.of_target and (draft is None or draft.checkpoint is None)  # layers among the target's own weights
    k = _draft_len(config, row, n_predict)
    # As in TensorRT-LLM, more than one MTP module means one module per draft. They then run in one engine.
    several = row.of_target and (n_predict or 1) > 1 and config.one_engine is not False
    vanilla = config.vanilla or (several and k <= (n_predict or 1))
    check_against_k(config, k)
    max_model_len = _max_model_len(config, k, target, draft)
    mode = select_mode(row.name, config.one_engine, vanilla, config.parallel_drafting)
    if row.of_target and not vanilla and k > 1:
        layers = f"each of {n_predict} MTP layers {k // (n_predict or 1)}" if several else f"one MTP layer {k}"
        warnings.warn(f"num_speculative_tokens={k} runs {layers} times; acceptance falls", stacklevel=3)
    # a quantisation that the checkpoint already has is no request to quantise
    quantization = config.quantization if config.quantization in QUANTIZATIONS else None
    options = MethodOptions if row.options is None else cast("type[MethodOptions]", row.options.open())
    capture = () if row.capture is None else row.capture.open()(config, target, draft)
    return SpeculationPlan(
        mode=mode,
        method=row.name,
        num_speculative_tokens=k,
        chooses_draft_len=_chooses_draft_len(config, row, n_predict),
        model=target.model if row.of_target and model is None else model,
        max_model_len=max_model_len,
        quantization=quantization or (target.quantization if inside else None),
        enforce_eager=config.enforce_eager,
        disable_logprobs=config.disable_logprobs,
        draft_tensor_parallel_size=_draft_tp(config, row, target),
        speculative_token_tree=plan_tree(config, k),
        dynamic_tree=plan_dynamic_tree(config, k, mode),
        sa_threshold=None if config.sa_config is None else config.sa_config.threshold,
        draft_sample_method=config.draft_sample_method,
        draft_confidence_threshold=config.draft_confidence_threshold,
        capture_layers=capture,
        mask_token_id=_mask_token_id(mode, target, draft),
        options=options.of(config),
        disable_by_batch_size=config.disable_by_batch_size,
        draft_len_schedule=None if config.draft_len_schedule is None else tuple(config.draft_len_schedule.items()),
        num_speculative_tokens_per_batch_size=config.num_speculative_tokens_per_batch_size,
        max_concurrency=config.max_concurrency,
        max_batch_size=target.max_batch_size,
        max_num_tokens=target.max_num_tokens,
    )


# -- the steps of planning, in order ----------------------------------------------------------------------------------


def fields_of(row: Method) -> set[str]:
    """Return the fields of SpeculativeConfig that the method takes, of those that not all methods take."""
    own = () if row.options is None else row.options.open().__dataclass_fields__
    return {*row.takes, *own}


def check_fields(config: SpeculativeConfig, row: Method) -> None:
    """Raise ConfigError for the first field that is set and that the method would ignore.

    A field that vLLM ignores too only gets a warning.
    """
    taken = fields_of(row)
    declared = set().union(*map(fields_of, METHODS.values()))
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if name in declared - taken and value != field.default:
            if name in _IGNORED:
                warnings.warn(f"{name}={value!r} means nothing to method={row.name!r}; it is ignored", stacklevel=4)
                continue
            raise ConfigError(f"{name}={value!r} means nothing to method={row.name!r}; remove it")


def _draft_len(config: SpeculativeConfig, row: Method, n_predict: int | None) -> int:
    """Return K: the user's number, else the one that the method or the checkpoint implies, else that of "auto".

    ConfigError if another setting needs a number, or if the checkpoint cannot make K drafts.
    """
    k, implied = config.draft_depth, row.implied_draft_len
    chooses = _chooses_draft_len(config, row, n_predict)
    if chooses and row.auto_draft_len is None:
        raise UnsupportedError(
            f"{config.choosing_settings} with method={row.name!r} is not built; {config.fixing_advice}"
        )
    if k is None:
        k = getattr(config, implied) if isinstance(implied, str) else implied or n_predict
        if k is not None:
            return k
        if not chooses:
            raise ConfigError(
                f"num_speculative_tokens=None and method={row.name!r} implies none; set it, to 3 for a start"
            )
        k = AUTO_DRAFT_LEN
    if k == AUTO_DRAFT_LEN:
        return _most_drafts(config, row, n_predict)
    assert isinstance(k, int)
    if n_predict is None or k <= n_predict:
        return k
    if row.most_drafts is not None:
        raise ConfigError(
            f"num_speculative_tokens={k} exceeds the {n_predict} {row.most_drafts}; use at most {n_predict}"
        )
    if config.vanilla:
        raise ConfigError(
            f"num_speculative_tokens={k} with n_predict={n_predict}: each draft is made by an MTP module of its own; "
            f"use at most {n_predict}, or vanilla=False to run modules more than once"
        )
    if k % n_predict != 0:
        raise ConfigError(
            f"num_speculative_tokens={k} must be divisible by n_predict={n_predict} of the draft checkpoint; use "
            f"{k // n_predict * n_predict}"
        )
    return k


_WITH_A_NUMBER = (
    "draft_len_schedule",
    "num_speculative_tokens_per_batch_size",
    "draft_confidence_threshold",
    "max_total_draft_tokens",
    "dynamic_tree_max_topK",
)
"""Settings next to which num_speculative_tokens must be a number."""


def _chooses_draft_len(config: SpeculativeConfig, row: Method, n_predict: int | None) -> bool:
    """Whether the engine chooses the number of drafts: if the user says so, or if nothing says otherwise."""
    if config.enable_adaptive_verification:
        return True
    if config.draft_depth is not None:
        return config.draft_depth == AUTO_DRAFT_LEN
    implied = row.implied_draft_len is not None or n_predict is not None or row.of_target
    return (
        not implied
        and row.auto_draft_len is not None
        and all(getattr(config, field) is None for field in _WITH_A_NUMBER)
    )


def _most_drafts(config: SpeculativeConfig, row: Method, n_predict: int | None) -> int:
    """Return the K of "auto": the most drafts that a step makes."""
    most = row.auto_draft_len
    assert most is not None
    if n_predict is None:
        return most
    if config.vanilla or row.most_drafts is not None:
        return n_predict if config.vanilla else min(most, n_predict)
    return max(most // n_predict, 1) * n_predict


def _max_model_len(config: SpeculativeConfig, k: int, target: TargetInfo, draft: DraftInfo | None) -> int:
    """Return the length in tokens of the longest sequence for which drafts are made."""
    limits = {"target": target.max_model_len}
    if draft is not None and draft.max_model_len is not None:
        limits["draft"] = draft.max_model_len
    for owner, limit in limits.items():
        if config.max_model_len is not None and config.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={config.max_model_len} exceeds the {owner}'s {limit}; use at most {limit}"
            )
        if limit <= k:  # even a sequence of one token leaves no room for K drafts
            raise ConfigError(
                f"max_model_len={limit} of the {owner} is too short to draft num_speculative_tokens={k}; use a smaller "
                "K or a model with a longer context"
            )
    length = min(limits.values()) if config.max_model_len is None else config.max_model_len
    if length <= k:
        raise ConfigError(
            f"max_model_len={length} is too short to draft num_speculative_tokens={k}; raise it above {k}"
        )
    return length


def _draft_tp(config: SpeculativeConfig, row: Method, target: TargetInfo) -> int:
    given, tp = config.draft_tensor_parallel_size, target.tensor_parallel_size
    if given is None:
        if row.one_rank and tp > 1:
            warnings.warn(f"draft_tensor_parallel_size: {row.name} runs on one rank; using 1", stacklevel=4)
        return 1 if row.one_rank else tp
    if given not in (1, tp):
        raise ConfigError(f"draft_tensor_parallel_size={given} is neither 1 nor the target's {tp}; use one of them")
    return given


def _mask_token_id(mode: SpeculativeDecodingMode, target: TargetInfo, draft: DraftInfo | None) -> int | None:
    if draft is None or not mode.drafts_in_parallel():
        return None
    mask = draft.mask_token_id
    if mask is None:
        raise ConfigError(
            f"mode={mode.name}: config.json of the draft has none of {', '.join(MASK_TOKEN_KEYS)}, so it was not "
            "trained to guess at mask tokens; use one that was, or leave parallel_drafting unset"
        )
    size = draft.vocab_size or target.vocab_size
    if not 0 <= mask < size:
        raise ConfigError(
            f"the draft's mask token {mask} is not in its vocabulary of {size} ids; correct its config.json "
            f"({', '.join(MASK_TOKEN_KEYS)})"
        )
    return mask
