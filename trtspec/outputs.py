"""What a caller gets back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationStats:
    """Counts of generation steps (context steps are not counted), of one sample, one request or a whole engine."""

    outcomes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Steps by (tokens emitted, bonus included; drafts offered)."""

    def observe(self, num_tokens: int, draft_len: int, steps: int = 1) -> None:
        """Generation steps that emitted `num_tokens` of `draft_len` + 1 each."""
        outcome = (num_tokens, draft_len)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + steps

    @property
    def steps(self) -> int:
        return sum(self.outcomes.values())

    @property
    def tokens(self) -> int:
        """Emitted by those steps, bonus included."""
        return sum(num_tokens * count for (num_tokens, _), count in self.outcomes.items())

    @property
    def drafted(self) -> list[int]:
        """[K] times position i was offered."""
        return self._by_position([(draft_len, count) for (_, draft_len), count in self.outcomes.items()])

    @property
    def accepted(self) -> list[int]:
        """[K] times position i was accepted."""
        return self._by_position([(num_tokens - 1, count) for (num_tokens, _), count in self.outcomes.items()])

    @property
    def num_drafts(self) -> int:
        """Steps that had drafts, however many."""
        return sum(count for (_, draft_len), count in self.outcomes.items() if draft_len)

    @property
    def num_draft_tokens(self) -> int:
        return sum(draft_len * count for (_, draft_len), count in self.outcomes.items())

    @property
    def num_accepted_tokens(self) -> int:
        return self.tokens - self.steps

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step that had drafts, bonus included: 1 + accepted / num_drafts; nan if none had."""
        return (self.num_drafts + self.num_accepted_tokens) / self.num_drafts if self.num_drafts else math.nan

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per generation step, with drafts or without, bonus included; nan before the first step."""
        return self.tokens / self.steps if self.outcomes else math.nan

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the drafts offered at position i (first = 0) that were accepted."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    def copy(self) -> SpeculationStats:
        """As it is now."""
        return SpeculationStats(self.outcomes.copy())

    def since(self, earlier: SpeculationStats) -> SpeculationStats:
        """What was observed after `earlier`, a copy of it."""
        news = {outcome: count - earlier.outcomes.get(outcome, 0) for outcome, count in self.outcomes.items()}
        return SpeculationStats({outcome: count for outcome, count in news.items() if count})

    @classmethod
    def total(cls, parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """The sum of several."""
        total = cls()
        for part in parts:
            for outcome, count in part.outcomes.items():
                total.outcomes[outcome] = total.outcomes.get(outcome, 0) + count
        return total

    def _by_position(self, lengths: list[tuple[int, int]]) -> list[int]:
        """[K] steps whose length covers position i; lengths: (length, steps)."""
        K = max((draft_len for _, draft_len in self.outcomes), default=0)
        return [sum(count for length, count in lengths if length > position) for position in range(K)]


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found a token, before penalties, temperature and filters. rank: tokens that are no less
    likely, itself among them. decoded_token: its text alone; None where the model folder has no tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class OutputDelta:
    """What one step gave one sample of a prompt. A sample's deltas in a row are its CompletionOutput, text and ids.

    The last one of a sample has a finish_reason, and may bring nothing else.
    """

    request_id: int
    index: int  # of the sample
    text: str  # new text; what may become a stop string, or is half a character, is held back
    token_ids: tuple[int, ...]  # new ids
    num_accepted_drafts: int  # so many of them, the first ones, were guessed
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    logprobs: tuple[dict[int, Logprob], ...] | None = None  # of token_ids, one each; see CompletionOutput

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class CompletionOutput:
    """One sample. finish_reason: "stop" (end of sequence, stop token or stop string), "length", "abort" or "error".

    drafter_error: why it was generated without drafts from some token on; that costs time and changes no token.
    logprobs: where asked for, a dict for each token, its own id first, then the most likely ones in order;
    cumulative_logprob: the sum of the tokens' own.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None  # the stop token id or string; None for end of sequence
    seed: int | None  # None for a greedy sample
    speculation: SpeculationStats
    error: str | None = None
    drafter_error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    """One prompt with its samples, in the order asked for."""

    request_id: int
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool

    @property
    def speculation(self) -> SpeculationStats:
        """Steps, tokens per step, acceptance length and acceptance per position over all samples."""
        return SpeculationStats.total(output.speculation for output in self.outputs)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step that had drafts, bonus included; nan if none had."""
        return self.speculation.acceptance_length

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per generation step, with drafts or without; nan before the first step."""
        return self.speculation.tokens_per_step

    @property
    def acceptance_per_position(self) -> list[float]:
        return self.speculation.acceptance_per_position

    @property
    def steps(self) -> int:
        return self.speculation.steps


def or_none(value: float) -> float | None:
    """A figure for JSON, which has no NaN: None in its place."""
    return None if math.isnan(value) else value
