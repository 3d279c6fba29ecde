"""Settings that one method alone takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from typing_extensions import Self

from trtspec.config.speculative import SpeculativeConfig


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """A room's own settings, spec_plan. Its fields are the fields of SpeculativeConfig that only this method takes."""

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        """What the user said, or the fields' defaults."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})
