"""What the engine offers a drafter that is being built."""

from __future__ import annotations

from typing import Protocol

from trtspec.config.resolved import ResolvedSpeculation
from trtspec.core import Drafter, Executable


class DraftResources(Protocol):
    """Handed to `from_resources` of the drafter that the mode's row names."""

    @property
    def speculation(self) -> ResolvedSpeculation: ...

    @property
    def max_num_tokens(self) -> int:
        """Rows that one launch may have."""
        ...

    def draft_model(self) -> Executable:
        """The draft checkpoint, loaded, with KV layers under the target's block ids."""
        ...


class BuildableDrafter(Drafter, Protocol):
    """A drafter that a row of the modes table names."""

    @classmethod
    def from_resources(cls, resources: DraftResources) -> Drafter: ...
