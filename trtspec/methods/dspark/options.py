"""The option that says where a block is cut."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.methods.options import MethodOptions


@dataclass(frozen=True, kw_only=True)
class DSparkOptions(MethodOptions):
    """Options of the method "dspark".

    draft_confidence_threshold: only the drafts before the first with a lower confidence are verified; None = all are.
    """

    draft_confidence_threshold: float | None
