"""Outputs that a caller receives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

_Key = TypeVar("_Key")


@dataclass(slots=True)
class SpeculationStats:
    """Counts of generation steps (context steps are not counted), of one sample, one request or a whole engine."""

    outcomes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of steps by (tokens emitted, bonus included; drafts offered)."""
    depths: dict[int, int] = field(default_factory=dict)
    """Number of steps by the depth of their drafts, where these are trees. A position is a depth there."""

    def observe(self, num_tokens: int, draft_len: int, steps: int = 1, depth: int | None = None) -> None:
        """Count `steps` generation steps that emitted `num_tokens` each and verified `draft_len` drafts.

        depth: of the drafts if they are a tree; None = they are a chain.
        """
        if depth is not None:
            self.depths[depth] = self.depths.get(depth, 0) + steps
        outcome = (num_tokens, draft_len)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + steps

    @property
    def steps(self) -> int:
        return sum(self.outcomes.values())

    @property
    def tokens(self) -> int:
        """Number of tokens that the steps emitted, bonus included."""
        return sum(num_tokens * count for (num_tokens, _), count in self.outcomes.items())

    @property
    def drafted(self) -> list[int]:
        """Number of times that a draft was offered at each position, [K]."""
        return self._by_position(self._lengths())

    @property
    def accepted(self) -> list[int]:
        """Number of times that a draft was accepted at each position, [K]."""
        return self._by_position([(num_tokens - 1, count) for (num_tokens, _), count in self.outcomes.items()])

    @property
    def num_drafts(self) -> int:
        """Number of steps that had drafts, whatever their number."""
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
        """A copy of the present counts."""
        return SpeculationStats(self.outcomes.copy(), self.depths.copy())

    def since(self, earlier: SpeculationStats) -> SpeculationStats:
        """Counts of the steps observed since `earlier`, an older copy of these counts."""
        return SpeculationStats(_news(self.outcomes, earlier.outcomes), _news(self.depths, earlier.depths))

    @classmethod
    def total(cls, parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """Sum of several counts."""
        total = cls()
        for part in parts:
            for outcome, count in part.outcomes.items():
                total.outcomes[outcome] = total.outcomes.get(outcome, 0) + count
            for depth, count in part.depths.items():
                total.depths[depth] = total.depths.get(depth, 0) + count
        return total

    def _by_position(self, lengths: list[tuple[int, int]]) -> list[int]:
        """Number of steps whose length covers each position, [K]. lengths: (length, steps)."""
        K = max((length for length, _ in self._lengths()), default=0)
        return [sum(count for length, count in lengths if length > position) for position in range(K)]

    def _lengths(self) -> list[tuple[int, int]]:
        """Number of drafts of steps, for a tree its depth, and the number of these steps."""
        return list(self.depths.items()) or [(draft_len, count) for (_, draft_len), count in self.outcomes.items()]


def _news(now: dict[_Key, int], earlier: dict[_Key, int]) -> dict[_Key, int]:
    """Counts that are new since `earlier`."""
    news = {key: count - earlier.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in news.items() if count}


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token in the model's own distribution, before penalties, temperature and filters.

    rank: number of tokens that are no less likely, itself included. decoded_token: what it stands for inside a text;
    None if the model folder has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class OutputDelta:
    """Output of one step for one sample of a prompt.

    The text and ids of a sample's deltas, joined in order, are those of its CompletionOutput. The last delta of a
    sample has a finish_reason, and may have nothing else.
    """

    request_id: int
    index: int  # of the sample
    text: str  # new text; half a character, or text that may become a stop string, is held back
    token_ids: tuple[int, ...]  # new ids
    num_accepted_drafts: int  # number of token_ids, the first ones, that were drafts
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    logprobs: tuple[dict[int, Logprob], ...] | None = None  # one entry for each of token_ids; see CompletionOutput

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class CompletionOutput:
    """One sample. finish_reason: "stop" (end of sequence, stop token or stop string), "length", "abort" or "error".

    drafter_error: why the sample had no drafts, or none of its grammar, from some token on. That costs time and changes
    no token.
    logprobs: if asked for, a dict for each token: its own id first, then the most likely ids in order.
    cumulative_logprob: sum of the tokens' own log-probabilities.
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
    """The value for JSON, which has no NaN: None takes its place."""
    return None if math.isnan(value) else value
