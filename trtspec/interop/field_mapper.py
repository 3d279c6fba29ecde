"""Common parts of the exports to other servers: a check that no field is forgotten, draft lengths by batch size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trtspec.config.speculation_plan import DraftInfo, scheduled_draft_len
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.methods.planning import check_fields, choose
from trtspec.modes import MODE_OF

GATES = ("disable_by_batch_size", "draft_len_schedule", "num_speculative_tokens_per_batch_size", "max_concurrency")
"""Fields that make the draft length depend on the number of running requests."""


@dataclass(frozen=True)
class FieldWarning:
    """A field that has no equal in the other server: its name, its value here, what the other server does instead."""

    field: str
    value: Any
    effect: str

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}: {self.effect}"


class FieldMapper:
    """The fields of one config that is exported to another server. Each field that is set is read, or warned about."""

    def __init__(self, config: SpeculativeConfig, draft: DraftInfo | None) -> None:
        """Raise ConfigError for what trtspec refuses too: no model, or fields that mean nothing to the method."""
        self.config, self.draft = config, draft
        row, model = choose(config, draft)
        check_fields(config, row)
        self.method = row.name
        self.has_draft = row.checkpoint is not None  # a model drafts, by sampling
        self.model = model if self.has_draft else None
        self._warnings: list[FieldWarning] = []
        self._open = {field for field in type(config).model_fields if self.is_set(field)} - {"method", "model"}

    def is_set(self, field: str) -> bool:
        """Whether the field has another value than its default."""
        return bool(getattr(self.config, field) != type(self.config).model_fields[field].default)

    def read(self, field: str) -> Any:
        """Value of the field, which the caller writes with the names of the other server."""
        self._open.discard(field)
        return getattr(self.config, field)

    def read_plain(self, *fields: str) -> dict[str, Any]:
        """Fields that are set, as JSON values. In the other server they have the same names and meanings."""
        return {field: _plain(self.read(field)) for field in fields if self.is_set(field)}

    def warn(self, field: str, effect: str, value: Any = None) -> None:
        """Add a warning for the field. value: what an unset field means here."""
        self._open.discard(field)
        own = getattr(self.config, field)
        self._warnings.append(FieldWarning(field, value if own is None else own, effect))

    def warn_if_set(self, field: str, effect: str) -> None:
        if self.is_set(field):
            self.warn(field, effect)

    def close(self, server: str) -> list[FieldWarning]:
        """All warnings in the order of the fields, including one for each field that no code has read."""
        for field in self._open.copy():
            self.warn(field, f"not written: {server} has no such setting")
        order = list(type(self.config).model_fields)
        return sorted(self._warnings, key=lambda warning: order.index(warning.field))

    # -- common to both servers -----------------------------------------------------------------------------------

    def draft_len(self, server: str) -> int:
        """K, for a server that requires it."""
        self.read("num_speculative_tokens")
        k = self.config.draft_depth
        if not isinstance(k, int):
            raise ConfigError(
                f"num_speculative_tokens={k!r} with method={self.method!r}: {server} needs a number; set it, to 3 for "
                "a start"
            )
        return k

    def gates(self) -> tuple[str, ...]:
        """The fields of GATES that are set. All of GATES count as read."""
        return tuple(field for field in GATES if self.read(field) is not None)

    def warn_gates(self, gates: tuple[str, ...], why: str) -> None:
        for field in gates:
            self.warn(field, f"not written: {why}; num_speculative_tokens are drafted at every batch size")

    def has_both_engines(self) -> bool:
        """Whether the method exists both with drafts inside the target's graph and with drafts next to it."""
        return {one_engine for method, one_engine, _, _ in MODE_OF if method == self.method} == {True, False}

    def in_parallel_anyway(self) -> bool:
        """Whether the method drafts in one pass over mask tokens, whatever `parallel_drafting` says."""
        return all(MODE_OF[words].drafts_in_parallel() for words in MODE_OF if words[0] == self.method)

    def refuse(self, server: str, nearest: str) -> UnsupportedError:
        """The error for a method that the server does not have."""
        return UnsupportedError(f"method={self.method!r} has no equal in {server}; nearest: {nearest}")


def draft_len_steps(config: SpeculativeConfig, k: int) -> list[tuple[int | None, int]]:
    """K by the number of running requests: (largest batch size, draft length), ascending; the last size is None.

    Neighbours differ in length. max_concurrency=n counts as {n: K}, as if max_num_tokens were no limit.
    """
    schedule = tuple((config.draft_len_schedule or {}).items()) or None
    ranges = config.num_speculative_tokens_per_batch_size
    sizes = {size for size in (config.disable_by_batch_size, config.max_concurrency) if size is not None}
    sizes |= {size for size, _ in schedule or ()}
    sizes |= {start - 1 for start, _, _ in ranges or () if start > 1}
    steps: list[tuple[int | None, int]] = []
    beyond = max(sizes, default=0) + 1
    for size in [*sorted(sizes), None]:
        n = beyond if size is None else size
        length = scheduled_draft_len(k, n, config.disable_by_batch_size, schedule, ranges)
        if config.max_concurrency is not None and n > config.max_concurrency:
            length = 0
        if steps and steps[-1][1] == length:
            steps.pop()
        steps.append((size, length))
    return steps


def _plain(value: Any) -> Any:
    """The value with tuples as lists; None, numbers and text stay as they are."""
    return json.loads(json.dumps(value))
