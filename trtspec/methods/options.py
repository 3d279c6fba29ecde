"""Settings that only one method takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from typing_extensions import Self

from trtspec.config.speculative import SpeculativeConfig


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The planned settings of one method. Its fields are those of SpeculativeConfig that only this method takes."""

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        """Take the user's values from `config`, or the defaults of its fields."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})
