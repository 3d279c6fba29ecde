"""From what the user said to what will run: `resolve(config, target, draft)`.

`plan` decides method, K, mode and lengths in vLLM's order and raises ConfigError; `resolve` then refuses what is not
built.
"""

from __future__ import annotations

import warnings
from pathlib import PurePath
from typing import Any

from trtspec.config.base import refuse_unbuilt
from trtspec.config.engine import QUANTIZATIONS
from trtspec.config.resolved import DraftInfo, ResolvedSpeculation, TargetInfo
from trtspec.config.speculative import SpeculativeConfig, check_against_k
from trtspec.config.tree import chain, parse_tree
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.methods.capture import default_capture_layers
from trtspec.methods.draft_len import STATE_HEADS, Suggestion, num_speculative_tokens, suggest
from trtspec.methods.mtp.checkpoint import MTP_TARGETS, mtp_capture_layers
from trtspec.methods.parallel.checkpoint import MASK_TOKEN_KEYS
from trtspec.modes import SpeculativeDecodingMode, resolve_mode

# Targets whose residual stream is known to be captured as EAGLE3 drafts expect.
EAGLE3_TARGETS = ("llama", "qwen", "minicpm", "gpt_oss")

# Methods that need no draft checkpoint, and so no `model`.
WITHOUT_CHECKPOINT = ("ngram", "suffix", "auto", "extract_hidden_states", "custom_class")

# Methods whose heads read the target's states after its last norm, and no others.
READS_LAST_STATE = ("eagle", *STATE_HEADS)

# A field that only some methods read: set for another method, it would be ignored, so it is an error.
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "prompt_lookup_min": ("ngram", "auto", "custom_class"),
    "prompt_lookup_max": ("ngram", "auto", "custom_class"),
    "prompt_lookup_latest": ("ngram", "auto", "custom_class"),
    "is_public_pool": ("ngram",),
    "is_keep_all": ("ngram",),
    "ngram_pool_size": ("ngram",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
    "capture_layers": ("eagle3", "dflash", "extract_hidden_states"),
    "output_directory": ("extract_hidden_states",),
    "write_interval": ("extract_hidden_states",),
    "file_prefix": ("extract_hidden_states",),
    "drafter": ("custom_class",),
    "vanilla": ("mtp",),
    "quantization": ("draft_model", "eagle", "eagle3", "dflash", "mtp", *STATE_HEADS),
}

# field -> (values that run today, what to do instead of any other)
_BUILT: dict[str, tuple[tuple[Any, ...], str]] = {
    "revision": ((None,), "checkpoints are local folders: pass the folder of that revision as model"),
    "code_revision": ((None,), "no code is loaded from checkpoints: leave it unset"),
    "quantization": (QUANTIZATIONS, "use int8, int4, int4_g64 or int4_g128, or leave it unset"),
    "draft_tensor_parallel_size": ((None, 1), "use 1"),
    "disable_logprobs": ((True,), "leave it True"),
    "rejection_sample_method": ((None, "strict"), "leave it unset for strict acceptance, which loses nothing"),
    "draft_sample_method": ((None, "greedy"), "leave it unset"),
    "enable_adaptive_verification": ((False,), "leave it unset, or use draft_len_schedule"),
    "acceptance_window": ((None,), "leave it unset, or use max_concurrency"),
}


def resolve(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None = None) -> ResolvedSpeculation:
    """`plan`, then UnsupportedError for what it asks for and nobody has built."""
    resolved = plan(config, target, draft)
    refuse_unbuilt("", dict(config), _BUILT)
    if resolved.mode.has_draft_model() and resolved.draft_tensor_parallel_size > 1:
        raise UnsupportedError(
            f"draft_tensor_parallel_size={resolved.draft_tensor_parallel_size} (the target's) is not built yet; use 1"
        )
    if resolved.speculative_token_tree != chain(resolved.num_speculative_tokens):
        raise UnsupportedError(
            f"speculative_token_tree={config.speculative_token_tree!r} branches, which is not built yet; leave it unset"
        )
    return resolved


def plan(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None = None) -> ResolvedSpeculation:
    """Decide everything, built or not. Raises ConfigError; UnsupportedError only where there is no mode to name."""
    method, model = method_and_model(config, target, draft)
    check_fields(config, method)
    _check_draft(config, method, target, draft)

    auto = suggest(target.max_batch_size) if method == "auto" else None
    n_predict = _n_predict(method, model, target, draft)
    # TensorRT-LLM: more than one MTP module means one module per draft; they are one engine then
    several = method == "mtp" and (n_predict or 1) > 1 and config.one_engine is not False
    vanilla = config.vanilla or several
    k = num_speculative_tokens(config, method, n_predict, auto, vanilla)
    check_against_k(config, k)
    max_model_len = _max_model_len(config, method, k, target, draft)
    if auto:
        method = model = "ngram"
    mode = resolve_mode(method, config.one_engine, vanilla, config.parallel_drafting)
    if config.use_heterogeneous_vocab and not mode.is_draft_target():
        raise ConfigError(
            f"use_heterogeneous_vocab=True with mode={mode.name}: ids are translated for a draft model beside the "
            "target alone; set one_engine=False and parallel_drafting=False"
        )
    if method == "mtp" and not vanilla and k > 1:
        warnings.warn(f"num_speculative_tokens={k} runs one MTP layer {k} times; acceptance falls", stacklevel=3)
    low, high = lookup_sizes(config, auto)
    return ResolvedSpeculation(
        mode=mode,
        method=method,
        num_speculative_tokens=k,
        model=model,
        max_model_len=max_model_len,
        quantization=config.quantization or (target.quantization if method == "mtp" else None),
        enforce_eager=config.enforce_eager,
        draft_tensor_parallel_size=_draft_tp(config, method, target),
        prompt_lookup_min=low,
        prompt_lookup_max=high,
        prompt_lookup_latest=config.prompt_lookup_latest,
        is_public_pool=config.is_public_pool,
        is_keep_all=config.is_keep_all,
        ngram_pool_size=config.ngram_pool_size,
        suffix_decoding_max_tree_depth=config.suffix_decoding_max_tree_depth,
        suffix_decoding_max_cached_requests=config.suffix_decoding_max_cached_requests,
        suffix_decoding_max_spec_factor=config.suffix_decoding_max_spec_factor,
        suffix_decoding_min_token_prob=config.suffix_decoding_min_token_prob,
        speculative_token_tree=_tree(config, k),
        draft_sample_method=config.draft_sample_method,
        use_heterogeneous_vocab=config.use_heterogeneous_vocab,
        capture_layers=_capture_layers(config, method, target, draft),
        mask_token_id=_mask_token_id(mode, target, draft),
        drafter=config.drafter,
        output_directory=config.output_directory,
        write_interval=config.write_interval,
        file_prefix=config.file_prefix,
        disable_by_batch_size=config.disable_by_batch_size,
        draft_len_schedule=None if config.draft_len_schedule is None else tuple(config.draft_len_schedule.items()),
        num_speculative_tokens_per_batch_size=config.num_speculative_tokens_per_batch_size,
        max_concurrency=_max_concurrency(config, auto),
        max_batch_size=target.max_batch_size,
        max_num_tokens=target.max_num_tokens,
    )


# -- the steps of plan, in order --------------------------------------------------------------------------------------


def check_fields(config: SpeculativeConfig, method: str) -> None:
    """ConfigError for the first field that is set and that `method` would ignore."""
    for field, methods in _ONLY_FOR.items():
        value = getattr(config, field)
        if method not in methods and value != type(config).model_fields[field].default:
            raise ConfigError(f"{field}={value!r} means nothing to method={method!r}; remove it")
    if config.use_heterogeneous_vocab and (method != "draft_model" or config.draft_sample_method == "probabilistic"):
        raise ConfigError(
            f"use_heterogeneous_vocab=True with method={method!r}, draft_sample_method={config.draft_sample_method!r}; "
            "use it with method='draft_model' and draft_sample_method unset or 'greedy', or remove it"
        )


def method_and_model(
    config: SpeculativeConfig, target: TargetInfo | None, draft: DraftInfo | None
) -> tuple[str, str | None]:
    """The method (an explicit one wins over any hint) and the draft checkpoint; without a target, None is its own."""
    method, model = config.method, config.model
    if model in ("ngram", "[ngram]") and method in (None, "ngram"):
        return "ngram", "ngram"
    if model is not None and model == method == "suffix":
        return method, model
    if method in WITHOUT_CHECKPOINT:
        if model is not None and method != "custom_class":
            raise ConfigError(f"model={model!r} means nothing to method={method!r}; remove it")
        return method, method if method in ("ngram", "suffix") else model
    if model is None:
        if method == "mtp":
            return method, None if target is None else target.model
        if config.num_speculative_tokens is not None:
            raise ConfigError(
                f"num_speculative_tokens was provided but without speculative model. (method={method!r}, model=None: "
                "set model to a draft checkpoint, or method='ngram')"
            )
        raise ConfigError(f"method={method!r}, model=None: set model to a draft checkpoint, or method='ngram'")
    return method or _method_from_hints(model, draft), model


def _method_from_hints(model: str, draft: DraftInfo | None) -> str:
    if draft is not None and draft.is_eagle3:
        return "eagle3"
    kind = draft.model_type if draft is not None else ""
    if kind in (*STATE_HEADS, "dflash"):
        return kind
    if draft is not None and draft.is_eagle:
        return "eagle"
    name = PurePath(model).name.lower()  # the folder's own name: a parent folder says nothing about a model
    if "eagle-" in name:
        return "eagle"
    if "eagle3" in name:
        return "eagle3"
    return "mtp" if kind in MTP_TARGETS or kind.endswith("_mtp") else "draft_model"


def _check_draft(config: SpeculativeConfig, method: str, target: TargetInfo, draft: DraftInfo | None) -> None:
    if method == "eagle3" and not any(kind in target.model_type for kind in EAGLE3_TARGETS):
        raise ConfigError(
            f"method='eagle3' with a target of model_type={target.model_type!r}; use a target of "
            + ", ".join(EAGLE3_TARGETS)
        )
    # EAGLE3's own smaller vocabulary maps through d2t; only a whole model must speak the target's ids
    whole = method == "draft_model" and not config.use_heterogeneous_vocab
    if whole and draft is not None and draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"vocab_size={draft.vocab_size} of the draft model={config.model!r} differs from the target's "
            f"{target.vocab_size}; use a draft with the target's tokenizer, or set use_heterogeneous_vocab=True"
        )


def _n_predict(method: str, model: str | None, target: TargetInfo, draft: DraftInfo | None) -> int | None:
    if method == "mtp" and model == target.model:
        return target.n_predict
    return None if draft is None or method in WITHOUT_CHECKPOINT else draft.n_predict


def _max_model_len(config: SpeculativeConfig, method: str, k: int, target: TargetInfo, draft: DraftInfo | None) -> int:
    """Longest sequence (tokens) for which drafts are made."""
    limits = {"target": target.max_model_len}
    if draft is not None and draft.max_model_len is not None and method not in WITHOUT_CHECKPOINT:
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


def lookup_sizes(config: SpeculativeConfig, auto: Suggestion | None = None) -> tuple[int, int]:
    """(prompt_lookup_min, prompt_lookup_max): both unset 5, 5; one unset copies the other; AUTO tries 1..n."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is None and high is None:
        return (1, auto.ngram) if auto else (5, 5)
    return low or high or 5, high or low or 5


def _max_concurrency(config: SpeculativeConfig, auto: Suggestion | None) -> int | None:
    own_rule = config.max_concurrency is not None or config.draft_len_schedule is not None
    return config.max_concurrency if own_rule or auto is None else auto.max_concurrency


def _draft_tp(config: SpeculativeConfig, method: str, target: TargetInfo) -> int:
    given, tp = config.draft_tensor_parallel_size, target.tensor_parallel_size
    if given is None:
        if method == "mlp_speculator" and tp > 1:
            warnings.warn("draft_tensor_parallel_size: an MLP speculator runs on one rank; using 1", stacklevel=4)
        return 1 if method == "mlp_speculator" else tp
    if given not in (1, tp):
        raise ConfigError(f"draft_tensor_parallel_size={given} is neither 1 nor the target's {tp}; use one of them")
    return given


def _tree(config: SpeculativeConfig, k: int) -> tuple[tuple[int, ...], ...]:
    if config.speculative_token_tree is None:
        return chain(k)
    tree = parse_tree(config.speculative_token_tree)
    if len(tree[-1]) != k:
        raise ConfigError(
            f"speculative_token_tree={config.speculative_token_tree!r} is {len(tree[-1])} deep but "
            f"num_speculative_tokens={k}; make them equal"
        )
    return tree


def _capture_layers(
    config: SpeculativeConfig, method: str, target: TargetInfo, draft: DraftInfo | None
) -> tuple[int, ...]:
    """What the method fixes, else the user's, else the draft checkpoint's, else EAGLE3's default."""
    if method in READS_LAST_STATE:
        return (-1,)
    if method == "mtp":
        return mtp_capture_layers(target.model_type, target.num_hidden_layers)
    if method not in _ONLY_FOR["capture_layers"]:
        return ()
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
