"""SpeculativeDecodingMode and the one table that says what each mode is.

A mode is a row of `_TRAITS`; every predicate reads that row. Adding a mode is one member after AUTO (values never move:
they are written into engine folders) and one row; adding a way to ask for it is one row of `MODE_OF`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Protocol

from trtspec.errors import ConfigError, UnsupportedError

# Attention backends with a multi-token-query kernel of their own. TensorRT-LLM users know it as "TRTLLM".
NATIVE_ATTENTION = frozenset({"native", "trtllm"})
# That kernel does not exist from this compute capability on (consumer Blackwell).
_NO_NATIVE_FROM_SM = 120


class DraftProgress(Protocol):
    """What `attention_need_spec_dec_mode` asks of a resource manager."""

    @property
    def is_first_draft(self) -> bool: ...


class SpeculativeDecodingMode(enum.IntEnum):
    """Which speculation runs. The predicates have TensorRT-LLM's names and meanings."""

    MTP = 1
    MTP_EAGLE = 2
    MTP_EAGLE_ONE_MODEL = 3
    EAGLE3 = 4
    EAGLE3_ONE_MODEL = 5
    NGRAM = 6
    DRAFT_TARGET = 7
    USER_PROVIDED = 8
    SAVE_HIDDEN_STATES = 9
    NONE = 10
    AUTO = 11
    SUFFIX = 12
    EAGLE = 13
    EAGLE_ONE_MODEL = 14
    MEDUSA = 15
    MLP_SPECULATOR = 16
    DRAFT_TARGET_ONE_MODEL = 17
    PARD = 18
    P_EAGLE = 19
    DFLASH = 20

    @staticmethod
    def from_string(name: str | None) -> SpeculativeDecodingMode:
        """The mode called `name`, in any case; None is NONE. Raises ConfigError for an unknown name."""
        if name is None:
            return SpeculativeDecodingMode.NONE
        try:
            return SpeculativeDecodingMode[name.upper()]
        except KeyError:
            known = ", ".join(mode.name for mode in SpeculativeDecodingMode)
            raise ConfigError(f"mode={name!r} is not a speculative decoding mode; use one of {known}") from None

    @property
    def traits(self) -> ModeTraits:
        return _TRAITS[self]

    # -- which one ----------------------------------------------------------------------------------------------
    def is_mtp_one_model(self) -> bool:
        return self.traits.mtp and self.traits.one_engine

    def is_mtp_vanilla(self) -> bool:
        return self is SpeculativeDecodingMode.MTP

    def is_mtp_eagle(self) -> bool:
        return self is SpeculativeDecodingMode.MTP_EAGLE

    def is_mtp_eagle_one_model(self) -> bool:
        return self is SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

    def is_eagle3(self) -> bool:
        return self is SpeculativeDecodingMode.EAGLE3

    def is_eagle3_one_model(self) -> bool:
        return self is SpeculativeDecodingMode.EAGLE3_ONE_MODEL

    def is_ngram(self) -> bool:
        return self is SpeculativeDecodingMode.NGRAM

    def is_draft_target(self) -> bool:
        return self is SpeculativeDecodingMode.DRAFT_TARGET

    def is_draft_target_one_model(self) -> bool:
        return self is SpeculativeDecodingMode.DRAFT_TARGET_ONE_MODEL

    def is_user_provided(self) -> bool:
        return self is SpeculativeDecodingMode.USER_PROVIDED

    def is_save_hidden_states(self) -> bool:
        return self is SpeculativeDecodingMode.SAVE_HIDDEN_STATES

    def is_none(self) -> bool:
        return self is SpeculativeDecodingMode.NONE

    def is_auto(self) -> bool:
        return self is SpeculativeDecodingMode.AUTO

    def is_suffix(self) -> bool:
        return self is SpeculativeDecodingMode.SUFFIX

    def is_pard(self) -> bool:
        return self is SpeculativeDecodingMode.PARD

    # -- what it needs and supports -----------------------------------------------------------------------------
    def use_one_engine(self) -> bool:
        """Drafts are made inside the target's graph."""
        return self.traits.one_engine

    def without_logits(self) -> bool:
        """The graph hands out accepted tokens, not logits."""
        return self.traits.one_engine

    def support_capturable_guided_decoder(self) -> bool:
        """Guided decoding runs inside the captured graph."""
        return self.traits.one_engine

    def has_draft_model(self) -> bool:
        """A draft model of its own runs beside the target."""
        return self.traits.draft_model

    def needs_kv_cache_rewind(self) -> bool:
        """The mode itself rewinds rejected KV (trtspec's commit does so in every mode)."""
        return self.traits.kv_rewind

    def needs_kv_cache_recompute(self) -> bool:
        """The first draft forward recomputes the KV of the accepted tokens."""
        return self.traits.kv_recompute

    def reads_hidden_states(self) -> bool:
        """Draft layers beside the target read its hidden states, which it hands out."""
        return self.traits.head is not None and not self.traits.one_engine

    def drafts_without_kv(self) -> bool:
        """Its draft layers read the target's states and keep no KV of their own."""
        return self.traits.without_kv

    def drafts_in_parallel(self) -> bool:
        """All drafts of a step come from one pass, over mask tokens."""
        return self.traits.parallel

    def drafts_in_blocks(self) -> bool:
        """Likewise, and the rows of that pass see each other."""
        return self.traits.in_blocks

    def rows_ahead(self, max_draft_len: int) -> int:
        """Rows of KV that drafting writes, or sees, behind the rows of a step."""
        return max_draft_len + self.drafts_in_blocks()

    def draft_kv_is_shifted(self) -> bool:
        """Draft KV of a token depends on the token after it: so it is where layers read the target's states."""
        inside = self.traits.one_engine and not (self.traits.unshifted or self.traits.without_kv)
        return inside or self.traits.kv_recompute

    def support_overlap_scheduler(self) -> bool:
        """Step n+1 may start before the host has read step n."""
        return self.traits.one_engine or self.traits.draft_model

    def support_guided_decoder(self) -> bool:
        """Guided decoding runs on the host, between the target and the drafter."""
        return self.is_none() or self.traits.spec_drafter

    def need_load_draft_weights(self) -> bool:
        """The target's graph loads a second checkpoint."""
        return self.traits.load_draft_weights

    def shapes_graphs(self) -> bool:
        """What is compiled differs from plain decoding: other graphs of the target, or a draft's beside it."""
        return self.traits.one_engine or self.traits.draft_model or self.is_save_hidden_states()

    def has_spec_decoder(self) -> bool:
        return self.traits.spec_decoder

    def has_spec_drafter(self) -> bool:
        """Proposals come from outside the target's graph."""
        return self.traits.spec_drafter

    def extend_ctx(self, attention_backend: str, sm_version: int = 0) -> bool:
        """Whether draft rows are presented to the attention kernel as chunked context.

        `sm_version` is the compute capability as major*10 + minor; 0 for a CPU.
        """
        native = _is_native(attention_backend) and sm_version < _NO_NATIVE_FROM_SM
        return not self.traits.one_engine and not native

    def attention_need_spec_dec_mode(
        self,
        spec_resource_manager: DraftProgress | None,
        is_draft_model: bool,
        attention_backend: str,
        use_chain_drafter: bool,
        sm_version: int = 0,
    ) -> bool:
        """Whether the attention kernel runs in multi-token-query mode. As upstream, every mode that is not
        one-engine counts as two-model here."""
        if self.traits.one_engine:
            return sm_version < _NO_NATIVE_FROM_SM
        if not _is_native(attention_backend):
            return False
        first_draft = spec_resource_manager is not None and spec_resource_manager.is_first_draft
        return not is_draft_model or (first_draft and use_chain_drafter)


def _is_native(attention_backend: str) -> bool:
    return attention_backend.lower() in NATIVE_ATTENTION


@dataclass(frozen=True)
class ModeTraits:
    """One row: what a mode is. `worker`, `drafter` and `head` are "module:name" paths, imported only by
    build/wiring.py."""

    mtp: bool = False  # the heads come with the target's checkpoint
    one_engine: bool = False
    draft_model: bool = False
    kv_rewind: bool = False
    kv_recompute: bool = False
    load_draft_weights: bool = False
    without_kv: bool = False  # draft layers that keep none
    parallel: bool = False  # all drafts come from one pass over mask tokens
    in_blocks: bool = False  # likewise, and the rows of a pass see each other
    unshifted: bool = False  # one-engine, yet draft KV of a token depends on no later one
    spec_decoder: bool = False
    spec_drafter: bool = False
    worker: str | None = None  # one-engine
    drafter: str | None = None  # two-engine
    head: str | None = None  # methods.head_weights.HeadWeights, for either


_M = SpeculativeDecodingMode


def _inside(head: str, worker: str = "trtspec.methods.worker:SpecWorker", mtp: bool = False) -> ModeTraits:
    """Draft layers in the target's graph. Whose weights are not the target's have a checkpoint of their own."""
    return ModeTraits(
        mtp=mtp,
        one_engine=True,
        kv_rewind=True,
        load_draft_weights=not mtp,
        spec_decoder=True,
        worker=worker,
        head=head,
    )


def _beside(head: str, mtp: bool = False) -> ModeTraits:
    """Draft layers that read the target's states, as an engine of their own."""
    return ModeTraits(
        mtp=mtp,
        draft_model=True,
        kv_recompute=True,
        spec_decoder=True,
        spec_drafter=True,
        drafter="trtspec.methods.head_drafter:HeadDrafter",
        head=head,
    )


_TRAITS: dict[SpeculativeDecodingMode, ModeTraits] = {
    _M.MTP: _inside("trtspec.methods.mtp.weights:MtpWeights", "trtspec.methods.mtp.worker:MtpWorker", mtp=True),
    _M.MTP_EAGLE: _beside("trtspec.methods.mtp.weights:MtpWeights", mtp=True),
    _M.MTP_EAGLE_ONE_MODEL: _inside("trtspec.methods.mtp.weights:MtpWeights", mtp=True),
    _M.EAGLE3: _beside("trtspec.methods.eagle3.weights:Eagle3Weights"),
    _M.EAGLE3_ONE_MODEL: _inside("trtspec.methods.eagle3.weights:Eagle3Weights"),
    _M.NGRAM: ModeTraits(kv_rewind=True, spec_drafter=True, drafter="trtspec.methods.ngram.drafter:NGramDrafter"),
    _M.DRAFT_TARGET: ModeTraits(draft_model=True, spec_drafter=True, drafter="trtspec.methods.chain:ChainDrafter"),
    _M.USER_PROVIDED: ModeTraits(spec_drafter=True),  # the drafter comes with the config
    _M.SAVE_HIDDEN_STATES: ModeTraits(spec_drafter=True),  # drafts nothing; see methods.step.CaptureStep
    _M.NONE: ModeTraits(),
    _M.AUTO: ModeTraits(),  # becomes another mode when the config is resolved
    _M.SUFFIX: ModeTraits(kv_rewind=True, spec_drafter=True, drafter="trtspec.methods.suffix.drafter:SuffixDrafter"),
    _M.EAGLE: _beside("trtspec.methods.eagle.weights:EagleWeights"),
    _M.EAGLE_ONE_MODEL: _inside("trtspec.methods.eagle.weights:EagleWeights"),
    _M.MEDUSA: replace(_inside("trtspec.methods.medusa.weights:MedusaWeights"), without_kv=True),
    _M.MLP_SPECULATOR: replace(_inside("trtspec.methods.mlp_speculator.weights:MLPSpeculatorWeights"), without_kv=True),
    _M.DRAFT_TARGET_ONE_MODEL: replace(
        _inside(
            "trtspec.methods.draft_model.head:DecoderWeights", "trtspec.methods.draft_model.worker:DraftModelWorker"
        ),
        unshifted=True,
        spec_decoder=False,
    ),
    _M.PARD: replace(
        _inside("trtspec.methods.draft_model.head:DecoderWeights", "trtspec.methods.parallel.worker:PardWorker"),
        parallel=True,
        unshifted=True,
        spec_decoder=False,
    ),
    _M.P_EAGLE: replace(
        _inside("trtspec.methods.eagle3.weights:Eagle3Weights", "trtspec.methods.parallel.worker:PEagleWorker"),
        parallel=True,
    ),
    _M.DFLASH: replace(
        _inside("trtspec.methods.dflash.weights:DFlashWeights", "trtspec.methods.dflash.worker:DFlashWorker"),
        parallel=True,
        in_blocks=True,
        unshifted=True,
    ),
}

# The user's words -> mode: (method, one_engine, vanilla, parallel). A row that is not here is refused.
MODE_OF: dict[tuple[str, bool, bool, bool], SpeculativeDecodingMode] = {
    ("draft_model", False, False, False): _M.DRAFT_TARGET,
    ("draft_model", True, False, False): _M.DRAFT_TARGET_ONE_MODEL,
    ("draft_model", True, False, True): _M.PARD,
    ("eagle", True, False, False): _M.EAGLE_ONE_MODEL,
    ("eagle", False, False, False): _M.EAGLE,
    ("eagle3", True, False, False): _M.EAGLE3_ONE_MODEL,
    ("eagle3", False, False, False): _M.EAGLE3,
    ("eagle3", True, False, True): _M.P_EAGLE,
    ("mtp", True, True, False): _M.MTP,
    ("mtp", True, False, False): _M.MTP_EAGLE_ONE_MODEL,
    ("mtp", False, False, False): _M.MTP_EAGLE,
    ("ngram", False, False, False): _M.NGRAM,
    ("suffix", False, False, False): _M.SUFFIX,
    ("extract_hidden_states", False, False, False): _M.SAVE_HIDDEN_STATES,
    ("custom_class", False, False, False): _M.USER_PROVIDED,
    ("auto", False, False, False): _M.AUTO,
    ("medusa", True, False, False): _M.MEDUSA,
    ("mlp_speculator", True, False, False): _M.MLP_SPECULATOR,
    ("dflash", True, False, False): _M.DFLASH,
    ("dflash", True, False, True): _M.DFLASH,  # what it is anyway
}


def words_for(mode: SpeculativeDecodingMode) -> dict[str, str | bool]:
    """The SpeculativeConfig fields that ask for `mode`: the inverse of MODE_OF. Empty for NONE."""
    for (method, one_engine, vanilla, parallel), found in MODE_OF.items():
        if found is mode:
            rare = {"vanilla": vanilla, "parallel_drafting": parallel}
            return {"method": method, "one_engine": one_engine, **{name: True for name, on in rare.items() if on}}
    return {}


# Methods that are known but have no mode yet; their members will come after AUTO.
METHODS_WITHOUT_MODE = ("dspark",)
METHODS: tuple[str, ...] = (*dict.fromkeys(key[0] for key in MODE_OF), *METHODS_WITHOUT_MODE)

# A whole model drafts beside the target unless it is asked into its graph: as in vLLM, and as a graph that holds both
# must be compiled anew whenever one of them changes.
TWO_ENGINE_BY_DEFAULT = ("draft_model",)


def resolve_mode(
    method: str | None, one_engine: bool | None, vanilla: bool = False, parallel: bool = False
) -> SpeculativeDecodingMode:
    """The mode for the user's words. method None is NONE; one_engine None is one-engine where a worker exists, except
    for TWO_ENGINE_BY_DEFAULT.

    Raises ConfigError for an unknown method or a combination that means nothing, UnsupportedError for a method that has
    no mode yet.
    """
    if method is None:
        return _M.NONE
    if method not in METHODS:
        raise ConfigError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    if method in METHODS_WITHOUT_MODE:
        ready = ", ".join(dict.fromkeys(key[0] for key in MODE_OF))
        raise UnsupportedError(f"method={method!r} is not built yet; use one of {ready}")
    parallels = [key[0] for key in MODE_OF if key[3]]
    if parallel and method not in parallels:
        raise ConfigError(
            f"parallel_drafting=True does not exist for method={method!r}; leave it unset, or use one of "
            f"{', '.join(parallels)}"
        )
    preferred = method not in TWO_ENGINE_BY_DEFAULT
    for engine in (preferred, not preferred) if one_engine is None else (one_engine,):
        mode = MODE_OF.get((method, engine, vanilla, parallel))
        if mode is not None:
            return mode
    offers = " or ".join(f"one_engine={e}, vanilla={v}" for (m, e, v, p) in MODE_OF if (m, p) == (method, parallel))
    beside = " with parallel_drafting=True" if parallel else ""
    raise ConfigError(
        f"one_engine={one_engine}, vanilla={vanilla} does not exist for method={method!r}{beside}; use {offers}"
    )
