"""Where a block is cut."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.methods.options import MethodOptions


@dataclass(frozen=True, kw_only=True)
class DSparkOptions(MethodOptions):
    """draft_confidence_threshold: drafts before the first whose confidence is below it are verified; None = all."""

    draft_confidence_threshold: float | None
