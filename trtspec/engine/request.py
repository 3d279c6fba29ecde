"""One sample of one request, from submission to its last token."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from trtspec.engine.logprobs import LogprobRecord
from trtspec.kv.blocks import SequenceKV
from trtspec.outputs import SpeculationStats
from trtspec.sampling_params import RequestSampling
from trtspec.text import TextStream
from trtspec.verify.grammar import Guide


@dataclass(eq=False, slots=True)
class Request:
    """A sample of a request. `tokens` is its prompt and output.

    The KV of all but the newest token is in the cache, or is computed again after a preemption.
    """

    request_id: int
    tokens: list[int]
    prompt_len: int
    sampling: RequestSampling
    length_limit: int  # tokens in all, prompt included
    min_tokens: int
    eos_ids: frozenset[int]  # empty if ignored
    stop_token_ids: frozenset[int]
    include_stop: bool
    text: TextStream | None  # None: there is no tokenizer, or the caller wants ids only
    logprobs: LogprobRecord | None = None  # None: not asked for
    guide: Guide | None = None  # the grammar's state after `tokens`; None: unconstrained
    kv: SequenceKV = field(default_factory=SequenceKV)
    drafts: list[int] = field(default_factory=list)  # proposal for the next step; never modified in place
    pending: int = 0  # rows in steps that are in flight
    # where each tree has a shape of its own: the draft before each draft, -1 = the last token
    draft_parents: Sequence[int] = ()
    draft_scores: Sequence[float] = ()  # of the drafts as they were made (Proposal.draft_scores); () = not known
    num_own_drafts: int = 0  # of a guided request: the first drafts are a drafter's, the others its guide's
    looked_up: bool = False  # its drafts were looked up, though draft layers or a draft model made others
    is_cut: bool = False  # the drafter's next draft was forbidden
    pending_drafts: int = 0  # drafts that the newest step in flight makes for the next one
    max_draft_len: int = sys.maxsize  # the request's own limit of drafts per step; K is another
    speculates: bool = True  # False: it wants no drafts, or its drafter failed
    drafter_error: Exception | None = None  # why its drafter failed
    reuses_prefix: bool = True  # False: every row is computed, because the caller wants an output of every row
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    needs_host: bool = field(init=False)  # its logit constraints or logprobs are made on the host in every step
    follows_grammar: bool = field(init=False)  # its guide adds drafts and drops others; False once that failed
    token_array: array[int] = field(init=False, default_factory=lambda: array("i"))  # see int32_tokens

    def __post_init__(self) -> None:
        self.needs_host = bool(self.sampling.constraints) or self.logprobs is not None or self.guide is not None
        self.follows_grammar = self.guide is not None

    def int32_tokens(self) -> array[int]:
        """`tokens` as 32-bit integers, each converted once. Do not keep a view of it: the array could not grow."""
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
        """The text so far, without the part that is held back."""
        return "" if self.text is None else self.text.text

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens whose KV is committed, or will be if every draft in flight is accepted."""
        return self.kv.committed + self.pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV: 1 during generation, more while a prompt (or a preempted request) is prefilled."""
        return len(self.tokens) - self.num_scheduled_tokens

    @property
    def input_in_flight(self) -> bool:
        """Whether its next input token is an output of a step in flight."""
        return self.pending > 0 and self.num_uncomputed <= 0

    @property
    def is_context(self) -> bool:
        if self.input_in_flight:
            return False
        num_tokens = len(self.tokens)
        return num_tokens == self.prompt_len or num_tokens - self.num_scheduled_tokens > 1

    @property
    def num_drafts(self) -> int:
        """Number of drafts that its next step verifies."""
        return self.pending_drafts if self.pending else len(self.drafts)

    @property
    def will_finish(self) -> bool:
        """Whether the step in flight finishes it: even a single token reaches its length limit."""
        return self.input_in_flight and len(self.tokens) + 1 >= self.length_limit

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, tokens: Sequence[int]) -> None:
        """Append the tokens of a verdict, up to the one that finishes the request."""
        short = len(self.tokens) + len(tokens) < self.length_limit
        if short and self.text is None and self.eos_ids.isdisjoint(tokens) and self.stop_token_ids.isdisjoint(tokens):
            self.tokens += tokens
            return
        for token in tokens:
            self.tokens.append(token)
            if self._ends_with(token):
                break

    def drop_draft_kv(self, made: Sequence[int]) -> None:
        """Drop the draft KV of drafts that were `made`, from the first that `drafts` does not have."""
        same = next((j for j, pair in enumerate(zip(made, self.drafts, strict=False)) if pair[0] != pair[1]), len(made))
        self.kv.draft_kv_len = min(self.kv.draft_kv_len, len(self.tokens) + same)

    def keep_drafts(self, nodes: Sequence[int]) -> None:
        """Keep these nodes of a tree of drafts, in ascending order. Their parents are among them."""
        place = {-1: -1, **{node: i for i, node in enumerate(nodes)}}
        self.drafts = [self.drafts[node] for node in nodes]
        self.draft_parents = [place[self.draft_parents[node]] for node in nodes]

    def fail(self, error: Exception) -> None:
        """Finish with an error; the tokens so far stay."""
        self.error = error
        self._finish("error")

    def abort(self) -> None:
        """Finish because the caller asked for it."""
        try:
            self._finish("abort")  # flushes the detokenizer, which may raise
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
            if self.text.matched_stop is not None and reason == "length":  # the flushed text completed it
                self.finish_reason, self.stop_reason = "stop", self.text.matched_stop
