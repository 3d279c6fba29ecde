"""Predicates of a mode as in TensorRT-LLM's SpecModeExtension, under its names.

They are for ported code that calls them. trtspec's engine calls none of them. Their docstrings say what the engine does
differently.
"""

from __future__ import annotations

from typing import Protocol

from trtspec.modes import SpeculativeDecodingMode

# Attention backends with their own multi-token-query kernel. Users of TensorRT-LLM know such a backend as "TRTLLM".
NATIVE_ATTENTION = frozenset({"native", "trtllm"})
# From this compute capability on (consumer Blackwell) that kernel does not exist.
_NO_NATIVE_FROM_SM = 120

_M = SpeculativeDecodingMode


class DraftProgress(Protocol):
    """The part of a resource manager that `attention_need_spec_dec_mode` reads."""

    @property
    def is_first_draft(self) -> bool: ...


def is_mtp_one_model(mode: SpeculativeDecodingMode) -> bool:
    return mode in (_M.MTP, _M.MTP_EAGLE_ONE_MODEL)


def is_mtp_eagle(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.MTP_EAGLE


def is_mtp_eagle_one_model(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.MTP_EAGLE_ONE_MODEL


def is_eagle3(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.EAGLE3


def is_eagle3_one_model(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.EAGLE3_ONE_MODEL


def is_ngram(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.NGRAM


def is_draft_target(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.DRAFT_TARGET


def is_draft_target_one_model(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.DRAFT_TARGET_ONE_MODEL


def is_pard(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.PARD


def is_user_provided(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.USER_PROVIDED


def is_none(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.NONE


def is_auto(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.AUTO


def is_suffix(mode: SpeculativeDecodingMode) -> bool:
    return mode is _M.SUFFIX


def without_logits(mode: SpeculativeDecodingMode) -> bool:
    """Whether the graph returns accepted tokens, not logits. trtspec's graphs return logits too, if a request asks."""
    return mode.traits.one_engine


def support_capturable_guided_decoder(mode: SpeculativeDecodingMode) -> bool:
    """Whether guided decoding runs in the captured graph. In trtspec masks are inputs of the graph in every mode."""
    return mode.traits.one_engine


def support_guided_decoder(mode: SpeculativeDecodingMode) -> bool:
    """Whether guided decoding runs on the host, between target and drafter. trtspec guides every mode."""
    return is_none(mode) or mode.traits.spec_drafter


def needs_kv_cache_rewind(mode: SpeculativeDecodingMode) -> bool:
    """Whether the mode itself rewinds rejected KV. trtspec's commit does so in every mode."""
    return mode.traits.kv_rewind


def needs_kv_cache_recompute(mode: SpeculativeDecodingMode) -> bool:
    """Whether the first draft forward recomputes the KV of the accepted tokens."""
    return mode.traits.reads_states


def support_overlap_scheduler(mode: SpeculativeDecodingMode) -> bool:
    """Whether step n+1 may start before the host has read step n. trtspec overlaps if no drafter waits on the host."""
    return mode.traits.one_engine or mode.traits.draft_model


def has_spec_decoder(mode: SpeculativeDecodingMode) -> bool:
    return mode.traits.spec_decoder


def has_spec_drafter(mode: SpeculativeDecodingMode) -> bool:
    """Whether drafts come from outside the target's graph."""
    return mode.traits.spec_drafter


def extend_ctx(mode: SpeculativeDecodingMode, attention_backend: str, sm_version: int = 0) -> bool:
    """Whether the attention kernel gets draft rows as chunked context.

    sm_version: compute capability as major*10 + minor; 0 for a CPU.
    """
    native = _is_native(attention_backend) and sm_version < _NO_NATIVE_FROM_SM
    return not mode.traits.one_engine and not native


def attention_need_spec_dec_mode(
    mode: SpeculativeDecodingMode,
    spec_resource_manager: DraftProgress | None,
    is_draft_model: bool,
    attention_backend: str,
    use_chain_drafter: bool,
    sm_version: int = 0,
) -> bool:
    """Whether the attention kernel runs in multi-token-query mode.

    As in TensorRT-LLM, every mode that is not one-engine counts as two-model here.
    """
    if mode.traits.one_engine:
        return sm_version < _NO_NATIVE_FROM_SM
    if not _is_native(attention_backend):
        return False
    first_draft = spec_resource_manager is not None and spec_resource_manager.is_first_draft
    return not is_draft_model or (first_draft and use_chain_drafter)


def _is_native(attention_backend: str) -> bool:
    return attention_backend.lower() in NATIVE_ATTENTION
