"""The interfaces between which a step's values flow: executables run a step, drafters make drafts for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from trtspec.carry import Carry
from trtspec.core import Proposal, StepInputs, StepOutputs
from trtspec.sampling_params import RequestSampling


class Executable(Protocol):
    """A model ready to run steps: eager torch, or a compiled graph."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Append the KV of the rows and draw. A step changes nothing but that KV, so it may be run again."""
        ...


class Launch(Protocol):
    """A launched step."""

    def wait(self) -> StepOutputs:
        """Wait for the step and return its outputs, in host memory. Raises the error that it ended with, if any."""
        ...


class AsyncExecutable(Executable, Protocol):
    """An executable that need not be waited for. Steps run one after the other, in the order of their launches."""

    def launch(self, inputs: StepInputs, carry: Carry | None = None) -> Launch:
        """Start a step as `run` does, but return before it is over. `inputs` must not change until then.

        carry: the outputs of the previous launch that this step takes as inputs.
        """
        ...


@dataclass(frozen=True)
class DraftRequest:
    """A drafter's view of one request that wants drafts."""

    request_id: int
    tokens: Sequence[int]  # prompt and output so far, read only; a slice of it is a new list
    max_draft_len: int  # 0..K, nodes of a tree; 0 = no drafts, only where hidden_states are given
    sampling: RequestSampling
    block_table: Sequence[int]  # covers len(tokens) + max_draft_len - 1 tokens
    draft_kv_len: int  # leading tokens whose draft KV is valid, less than len(tokens)
    # [rows, captured layers * H], for modes that read the target's states: those of the tokens from draft_kv_len on.
    # There are len(tokens) - draft_kv_len - 1 rows. Inside a prompt there may be fewer. Then max_draft_len
    # is 0: only draft KV is wanted.
    hidden_states: Tensor | None = None
    prompt_len: int = 0  # leading tokens that came with the request; the others are its response
    max_depth: int | None = None  # most tokens that drafts may be ahead, where they may be a tree; None: only a chain


class Drafter(Protocol):
    """The source of drafts outside the target's graph: a model of its own, or a lookup on the host."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Return one row per request, in order, with draft_lens[b] <= requests[b].max_draft_len.

        If a call for several requests raises or returns an invalid proposal, each request is asked for alone. A request
        whose own call fails gets no more drafts. A DeviceError ends all requests.
        """
        ...

    def forget(self, request_id: int) -> None:
        """Drop all state of a request, which has ended."""
        ...


@runtime_checkable
class LearningDrafter(Drafter, Protocol):
    """A drafter that may keep the text of ended requests for others."""

    def learn(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Take in the whole text of a request, prompt and output, before `forget`.

        `propose` does not get the tokens of the last step, and a request that drafts seldom is seldom proposed for.
        """
        ...


class Lookups(Protocol):
    """A source of drafts that replace those of draft layers or a draft model, where it has any."""

    def find(self, request_id: int, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most `count` drafts after a request's `tokens`, its prompt and output, which it must not change."""
        ...

    def forget(self, request_id: int) -> None:
        """Drop what is kept of a request that has ended."""
        ...
