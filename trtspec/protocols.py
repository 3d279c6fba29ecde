"""What makes a step's values flow: who runs a step, and who guesses for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trtspec.core import Carry, Proposal, StepInputs, StepOutputs
from trtspec.sampling_params import RequestSampling


class Executable(Protocol):
    """A model ready to run steps: eager torch, or a compiled graph."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Append the rows' KV and draw. It changes nothing but the KV of the rows given, so it may be run again."""
        ...


class Launch(Protocol):
    """A step that was launched."""

    def wait(self) -> StepOutputs:
        """Its outputs, in the host's memory, once it is over; or the error that it ended with."""
        ...


class AsyncExecutable(Executable, Protocol):
    """An executable that need not be waited for: steps run one after the other, in the order of their launches."""

    def launch(self, inputs: StepInputs, carry: Carry | None = None) -> Launch:
        """As `run`, but it returns before the step is over. `inputs` stay as they are until then.

        carry: what the step takes from the outputs of the launch before this one.
        """
        ...


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter is told of one request that wants drafts."""

    request_id: int
    tokens: Sequence[int]  # prompt and output so far, to be read; a slice of it is a list of one's own
    max_draft_len: int  # 0..K; 0 = no drafts, only where hidden_states are given
    sampling: RequestSampling
    block_table: Sequence[int]  # covers len(tokens) + max_draft_len - 1 tokens
    draft_kv_len: int  # leading tokens whose draft KV is valid, less than len(tokens)
    # for modes that read the target's states: those of the tokens from draft_kv_len on, [n, number * H]; n =
    # len(tokens) - draft_kv_len - 1, or fewer inside a prompt, and then max_draft_len is 0: no drafts, KV alone
    hidden_states: Tensor | None = None
    prompt_len: int = 0  # leading tokens that came with the request; the others are its response


class Drafter(Protocol):
    """Two-engine speculation: proposes from outside the target's graph."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """One row per request, in order, with draft_lens[b] <= requests[b].max_draft_len.

        If it raises or answers nonsense, it is asked the same for each request alone; those for which it does so again
        go on without drafts.
        """
        ...

    def forget(self, request_id: int) -> None:
        """The request has ended: drop what is kept for it."""
        ...
