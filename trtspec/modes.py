"""SpeculativeDecodingMode: a method, and how it is run.

A member is one line: its value, which never changes (engine folders hold it), and its traits. methods/table.py lists
the parts of a method, from its checkpoint to its trainer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from typing_extensions import Self

from trtspec.errors import ConfigError


@dataclass(frozen=True)
class ModeTraits:
    """Properties that follow from the mode alone.

    method, one_engine, vanilla, parallel are the user's words for the mode. by_default: if one_engine is None and the
    method has both kinds of mode, this mode runs. Otherwise the one-engine mode runs.
    """

    method: str = ""  # "": no method selects it
    one_engine: bool = False
    vanilla: bool = False  # each draft has its own MTP module
    parallel: bool = False  # all drafts come from one pass over mask tokens
    by_default: bool = False
    draft_model: bool = False  # a model of its own runs next to the target
    kv_rewind: bool = False
    reads_states: bool = False  # the draft model reads the target's hidden states
    without_kv: bool = False  # draft layers that keep no KV
    in_blocks: bool = False  # the rows of a parallel pass see each other
    unshifted: bool = False  # one-engine, but draft KV of a token depends on no later token
    spec_decoder: bool = False
    spec_drafter: bool = False
    shapes_graphs: bool = False  # what is compiled differs from plain decoding


def one_engine(
    method: str,
    *,
    vanilla: bool = False,
    parallel: bool = False,
    without_kv: bool = False,
    in_blocks: bool = False,
    unshifted: bool = False,
    spec_decoder: bool = True,
) -> ModeTraits:
    """Traits of a mode with draft layers in the target's graph."""
    return ModeTraits(
        method=method,
        one_engine=True,
        vanilla=vanilla,
        parallel=parallel,
        kv_rewind=True,
        without_kv=without_kv,
        in_blocks=in_blocks,
        unshifted=unshifted,
        spec_decoder=spec_decoder,
        shapes_graphs=True,
    )


def two_engine_head(method: str) -> ModeTraits:
    """Traits of a mode with draft layers that read the target's states, in an engine of their own."""
    return ModeTraits(
        method=method,
        draft_model=True,
        reads_states=True,
        spec_decoder=True,
        spec_drafter=True,
        shapes_graphs=True,
    )


def host(method: str, *, kv_rewind: bool = False, shapes_graphs: bool = False) -> ModeTraits:
    """Traits of a mode whose drafts, if any, are made on the host."""
    return ModeTraits(method=method, kv_rewind=kv_rewind, spec_drafter=True, shapes_graphs=shapes_graphs)


class SpeculativeDecodingMode(enum.IntEnum):
    """The kind of speculation that runs. The first members have the names and values of TensorRT-LLM's."""

    traits: ModeTraits

    def __new__(cls, value: int, traits: ModeTraits) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.traits = traits
        return member

    MTP = 1, one_engine("mtp", vanilla=True)
    MTP_EAGLE = 2, two_engine_head("mtp")
    MTP_EAGLE_ONE_MODEL = 3, one_engine("mtp")
    EAGLE3 = 4, two_engine_head("eagle3")
    EAGLE3_ONE_MODEL = 5, one_engine("eagle3")
    NGRAM = 6, host("ngram", kv_rewind=True)
    # By default a whole model drafts next to the target, as in vLLM. A graph that holds both must be compiled again
    # whenever one of them changes.
    DRAFT_TARGET = 7, replace(host("draft_model", shapes_graphs=True), by_default=True, draft_model=True)
    USER_PROVIDED = 8, host("custom_class")
    SAVE_HIDDEN_STATES = 9, host("extract_hidden_states", shapes_graphs=True)
    NONE = 10, ModeTraits()
    AUTO = 11, ModeTraits("auto")  # another mode replaces it when speculation is planned
    SUFFIX = 12, host("suffix", kv_rewind=True)
    EAGLE = 13, two_engine_head("eagle")
    EAGLE_ONE_MODEL = 14, one_engine("eagle")
    MEDUSA = 15, one_engine("medusa", without_kv=True)
    MLP_SPECULATOR = 16, one_engine("mlp_speculator", without_kv=True)
    DRAFT_TARGET_ONE_MODEL = 17, one_engine("draft_model", unshifted=True, spec_decoder=False)
    PARD = 18, one_engine("draft_model", parallel=True, unshifted=True, spec_decoder=False)
    P_EAGLE = 19, one_engine("eagle3", parallel=True)
    DFLASH = 20, one_engine("dflash", parallel=True, in_blocks=True, unshifted=True)
    DSPARK = 21, one_engine("dspark", parallel=True, in_blocks=True, unshifted=True)
    GRAMMAR = 22, host("grammar", kv_rewind=True)

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

    def is_mtp_vanilla(self) -> bool:
        """Whether each draft has its own MTP module."""
        return self.traits.vanilla

    def is_save_hidden_states(self) -> bool:
        """Whether nothing is drafted, and the target's hidden states are kept."""
        return self is SpeculativeDecodingMode.SAVE_HIDDEN_STATES

    def use_one_engine(self) -> bool:
        """Whether drafts are made inside the target's graph."""
        return self.traits.one_engine

    def has_draft_model(self) -> bool:
        """Whether a draft model of its own runs next to the target."""
        return self.traits.draft_model

    def reads_hidden_states(self) -> bool:
        """Whether draft layers next to the target read its hidden states, which it hands out."""
        return self.traits.reads_states

    def drafts_without_kv(self) -> bool:
        """Whether draft layers read the target's states and keep no KV of their own."""
        return self.traits.without_kv

    def drafts_in_parallel(self) -> bool:
        """Whether all drafts of a step come from one pass, over mask tokens."""
        return self.traits.parallel

    def drafts_in_blocks(self) -> bool:
        """Whether all drafts of a step come from one pass, whose rows see each other."""
        return self.traits.in_blocks

    def drafts_trees(self) -> bool:
        """Whether the drafts may be a tree: a model makes them, in a pass for each depth, by the same layers."""
        own_layers = self.traits.vanilla or self.traits.parallel  # each depth's, or one pass for all depths
        return self.traits.draft_model or (self.traits.one_engine and not own_layers)

    def takes_dynamic_trees(self) -> bool:
        """Whether each step may give the drafts of each request a tree of another shape."""
        return self.drafts_trees() or self.traits.method in ("ngram", "suffix", "custom_class")

    def rows_ahead(self, max_draft_len: int) -> int:
        """Number of KV rows that drafting writes, or sees, after the rows of a step."""
        return max_draft_len + self.drafts_in_blocks()

    def draft_kv_is_shifted(self) -> bool:
        """Whether draft KV of a token depends on the next token, as it does if layers read the target's states."""
        inside = self.traits.one_engine and not (self.traits.unshifted or self.traits.without_kv)
        return inside or self.traits.reads_states

    def shapes_graphs(self) -> bool:
        """Whether what is compiled differs from plain decoding: other graphs of the target, or a draft's next to it."""
        return self.traits.shapes_graphs


Words = tuple[str, bool, bool, bool]
"""The user's words for a mode: (method, one_engine, vanilla, parallel)."""


def _words(mode: SpeculativeDecodingMode) -> list[Words]:
    """All words for a mode, the shortest first. A block is parallel, whether or not the user says so."""
    traits = mode.traits
    parallels = (False, True) if traits.in_blocks else (traits.parallel,)
    return [(traits.method, traits.one_engine, traits.vanilla, parallel) for parallel in parallels if traits.method]


MODE_OF: dict[Words, SpeculativeDecodingMode] = {
    words: mode for mode in SpeculativeDecodingMode for words in _words(mode)
}
"""Mode by the user's words. Words that are not here are refused."""

METHODS: tuple[str, ...] = tuple(sorted({words[0] for words in MODE_OF}))


def words_for(mode: SpeculativeDecodingMode) -> dict[str, str | bool]:
    """SpeculativeConfig fields that select `mode`: the inverse of MODE_OF. Empty for NONE."""
    for method, one_engine, vanilla, parallel in _words(mode):
        rare = {"vanilla": vanilla, "parallel_drafting": parallel}
        return {"method": method, "one_engine": one_engine, **{name: True for name, on in rare.items() if on}}
    return {}


def select_mode(
    method: str | None, one_engine: bool | None, vanilla: bool = False, parallel: bool = False
) -> SpeculativeDecodingMode:
    """The mode for the user's words. method None selects NONE; one_engine None selects the mode that runs by default.

    Raises ConfigError for an unknown method or a combination that means nothing.
    """
    if method is None:
        return SpeculativeDecodingMode.NONE
    if method not in METHODS:
        raise ConfigError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    parallels = [name for name in METHODS if any(words[0] == name and words[3] for words in MODE_OF)]
    if parallel and method not in parallels:
        raise ConfigError(
            f"parallel_drafting=True does not exist for method={method!r}; leave it unset, or use one of "
            f"{', '.join(parallels)}"
        )
    asked = (method, vanilla, parallel)
    found = {words[1]: mode for words, mode in MODE_OF.items() if (words[0], *words[2:]) == asked}
    if one_engine is not None and one_engine in found:
        return found[one_engine]
    if one_engine is None and found:
        preferred = [mode for mode in found.values() if mode.traits.by_default]
        return preferred[0] if preferred else found.get(True) or found[False]
    offers = " or ".join(f"one_engine={e}, vanilla={v}" for (m, e, v, p) in MODE_OF if (m, p) == (method, parallel))
    extra = " with parallel_drafting=True" if parallel else ""
    raise ConfigError(
        f"one_engine={one_engine}, vanilla={vanilla} does not exist for method={method!r}{extra}; use {offers}"
    )
