"""What a caller gets back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationStats:
    """Counts of generation steps (context steps are not counted), of one sample, one request or a whole engine."""

    steps: int = 0
    tokens: int = 0  # emitted by those steps, bonus included
    drafted: list[int] = field(default_factory=list)  # [K] times position i was offered
    accepted: list[int] = field(default_factory=list)  # [K] times position i was accepted

    def observe(self, num_tokens: int, draft_len: int) -> None:
        """One generation step that emitted `num_tokens` of `draft_len` + 1."""
        self.steps += 1
        self.tokens += num_tokens
        missing = draft_len - len(self.drafted)
        if missing > 0:
            self.drafted += [0] * missing
            self.accepted += [0] * missing
        for position in range(draft_len):
            self.drafted[position] += 1
        for position in range(num_tokens - 1):
            self.accepted[position] += 1

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.drafted)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per generation step, bonus included; 1.0 without speculation; nan before the first step."""
        return self.tokens / self.steps if self.steps else float("nan")

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the drafts offered at position i (first = 0) that were accepted."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @classmethod
    def total(cls, parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """The sum of several."""
        total = cls()
        for part in parts:
            total.steps += part.steps
            total.tokens += part.tokens
            missing = len(part.drafted) - len(total.drafted)
            total.drafted += [0] * missing
            total.accepted += [0] * missing
            for i, (drafted, accepted) in enumerate(zip(part.drafted, part.accepted, strict=True)):
                total.drafted[i] += drafted
                total.accepted[i] += accepted
        return total


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

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class CompletionOutput:
    """One sample. finish_reason: "stop" (end of sequence, stop token or stop string), "length", "abort" or "error"."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None  # the stop token id or string; None for end of sequence
    seed: int | None  # None for a greedy sample
    speculation: SpeculationStats
    error: str | None = None


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
        """Steps, acceptance length and acceptance per position over all samples."""
        return SpeculationStats.total(output.speculation for output in self.outputs)

    @property
    def acceptance_length(self) -> float:
        return self.speculation.acceptance_length

    @property
    def acceptance_per_position(self) -> list[float]:
        return self.speculation.acceptance_per_position

    @property
    def steps(self) -> int:
        return self.speculation.steps
