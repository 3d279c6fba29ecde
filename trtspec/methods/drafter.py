"""The parts from which a drafter is built, and the signature of the function that builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.core import StepInputs
from trtspec.protocols import Drafter, Executable

CHAIN_ROWS = 2
"""Number of tokens of every request that a chain in one launch prefills.

Where all drafts were accepted, the draft KV of the last two tokens is missing, because the last draft was never fed
back. Rows whose KV exists already are recomputed to the same bits.
"""


class ChainExecutable(Protocol):
    """A draft model that runs all passes of a chain as one launch."""

    def run_chain(self, inputs: StepInputs, num_tokens: int) -> Tensor | None:
        """Return methods.chain.run_chain of a batch with CHAIN_ROWS rows for each request, [B, K] int64.

        None: no such launch exists for these inputs, and nothing was run.
        """
        ...


@dataclass(frozen=True)
class DraftModel:
    """A loaded draft checkpoint or head, whose KV layers live under the target's block ids."""

    executable: Executable
    chain: ChainExecutable | None = None  # the same model's chain, if the backend has it
    draft_lens: tuple[int, ...] = ()  # ascending chain lengths that a head can run; empty: any


class BuildDrafter(Protocol):
    """The signature of a drafter class's `of` method.

    A row of the method table names such a class for each of its two-engine modes.
    """

    def __call__(self, speculation: SpeculationPlan, model: DraftModel | None, max_num_tokens: int) -> Drafter:
        """Build the drafter. Raises ConfigError or CapacityError.

        model: the draft model, for modes that run one. max_num_tokens: maximum number of rows in one launch of the
        model.
        """
        ...
