"""One sample of one request, from submission to its last token."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from trtspec.engine.logprobs import LogprobRecord
from trtspec.kv.blocks import SequenceKV
from trtspec.outputs import SpeculationStats
from trtspec.sampling_params import ResolvedSampling
from trtspec.text import TextStream
from trtspec.verify.grammar import Guide


@dataclass(eq=False, slots=True)
class Request:
    """`tokens` is prompt and output; the KV of all but the newest is, or will again be, in the cache."""

    request_id: int
    tokens: list[int]
    prompt_len: int
    sampling: ResolvedSampling
    length_limit: int  # tokens in all, prompt included
    min_tokens: int
    eos_ids: frozenset[int]  # empty if ignored
    stop_token_ids: frozenset[int]
    include_stop: bool
    text: TextStream | None  # None: no tokenizer, or the caller wants ids only
    logprobs: LogprobRecord | None = None  # None: nobody wants them
    guide: Guide | None = None  # behind its tokens; None: they may be any
    kv: SequenceKV = field(default_factory=SequenceKV)
    drafts: list[int] = field(default_factory=list)  # proposal for the next step; do not change the list
    pending: int = 0  # rows in steps that are in flight: launched, their outputs not seen yet
    pending_drafts: int = 0  # drafts which the last of these makes for the step after it
    max_draft_len: int = sys.maxsize  # drafts that a step of it verifies at most, beside K
    speculates: bool = True  # False where it wants no drafts, or once its drafter failed it
    drafter_error: Exception | None = None  # with what
    reuses_prefix: bool = True  # False: every row is computed, because the caller wants what only computing gives
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    needs_host: bool = field(init=False)  # the host sees to its draws in every step
    token_array: array[int] = field(init=False, default_factory=lambda: array("i"))  # see known_tokens

    def __post_init__(self) -> None:
        self.needs_host = bool(self.sampling.edits) or self.logprobs is not None or self.guide is not None

    def known_tokens(self) -> array[int]:
        """`tokens` as 32-bit integers; each is converted once, however often this is asked. For use at once: who holds
        its memory keeps it from growing."""
        self.token_array.extend(self.tokens[len(self.token_array) :])
        return self.token_array

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def shown_text(self) -> str:
        """The text so far, without what is held back."""
        return "" if self.text is None else self.text.text

    @property
    def reach(self) -> int:
        """Tokens whose KV is committed, or will be if all that is in flight is accepted."""
        return self.kv.committed + self.pending

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV: 1 while generating, more while a prompt (or a preempted request) is read in."""
        return len(self.tokens) - self.reach

    @property
    def is_ahead(self) -> bool:
        """What it reads in next is drawn by a step that is in flight."""
        return self.pending > 0 and self.num_uncomputed <= 0

    @property
    def is_context(self) -> bool:
        if self.is_ahead:
            return False
        known = len(self.tokens)
        return known == self.prompt_len or known - self.reach > 1

    @property
    def num_drafts(self) -> int:
        """Drafts that its next step verifies."""
        return self.pending_drafts if self.pending else len(self.drafts)

    @property
    def surely_ends(self) -> bool:
        """With the step that is in flight: the one token that it gives at least is its last."""
        return self.is_ahead and len(self.tokens) + 1 >= self.length_limit

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, tokens: Sequence[int]) -> None:
        """Take the tokens of a verdict up to the one that ends the request."""
        short = len(self.tokens) + len(tokens) < self.length_limit
        if short and self.text is None and self.eos_ids.isdisjoint(tokens) and self.stop_token_ids.isdisjoint(tokens):
            self.tokens += tokens
            return
        for token in tokens:
            self.tokens.append(token)
            if self._ends_with(token):
                break

    def fail(self, error: Exception) -> None:
        """End with an error; what was generated so far stays."""
        self.error = error
        self._finish("error")

    def abort(self) -> None:
        """End on the caller's wish."""
        try:
            self._finish("abort")  # the detokenizer hands out what it held back: host code that may raise
        except Exception as error:
            self.fail(error)

    def _ends_with(self, token: int) -> bool:
        by_id = token in self.eos_ids or token in self.stop_token_ids
        stopped = by_id and self.num_output > self.min_tokens
        if self.text is not None and (not stopped or self.include_stop):
            self.text.push((token,))
        if stopped:
            self.stop_reason = None if token in self.eos_ids else token
            self._finish("stop")
        elif self.text is not None and self.text.matched_stop is not None:
            self.stop_reason = self.text.matched_stop
            self._finish("stop")
        elif len(self.tokens) >= self.length_limit:
            self._finish("length")
        return self.finished

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        if self.text is not None and reason != "error":
            self.text.flush()
            if self.text.matched_stop is not None and reason == "length":  # completed by what was held back
                self.finish_reason, self.stop_reason = "stop", self.text.matched_stop
