"""What the engine offers a drafter that is being built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.core import StepInputs
from trtspec.protocols import Drafter, Executable

CHAIN_ROWS = 2
"""Tokens of every request that a chain in one launch reads in: the draft KV of the last two is missing where all drafts
were accepted, as the last one was never fed back. Rows that were there already are computed anew, to the same bits."""


class ChainExecutable(Protocol):
    """A draft model that runs all passes of a chain as one launch."""

    def run_chain(self, inputs: StepInputs, num_tokens: int) -> Tensor | None:
        """methods.chain.run_chain of a batch with CHAIN_ROWS rows for each request: [B, K] int64. None: there is no
        such launch for these inputs, and nothing was done."""
        ...


@dataclass(frozen=True)
class DraftModel:
    """A draft checkpoint or head, loaded, with KV layers under the target's block ids."""

    executable: Executable
    chain: ChainExecutable | None = None  # of the same model, where the backend has it
    draft_lens: tuple[int, ...] = ()  # of a head's chains there are, sorted; empty: any


class BuildDrafter(Protocol):
    """`of` of a class that a row of the methods' table names as what drafts in a two-engine mode."""

    def __call__(self, speculation: SpeculationPlan, model: DraftModel | None, max_num_tokens: int) -> Drafter:
        """model: of modes that run one. max_num_tokens: rows that one launch of it may have. Raises ConfigError or
        CapacityError."""
        ...
