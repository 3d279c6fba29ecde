"""What the exports to other servers share: a check that no field is forgotten, and draft lengths by batch size."""

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
"""The fields that make the draft length depend on how many requests run."""


@dataclass(frozen=True)
class FieldWarning:
    """A field that has no equal on the other side: its name, its value here, what the other server does instead."""

    field: str
    value: Any
    effect: str

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}: {self.effect}"


class FieldMapper:
    """The fields of one config on their way to another server; each that is set is taken, or warned about."""

    def __init__(self, config: SpeculativeConfig, draft: DraftInfo | None) -> None:
        """Raises ConfigError for what trtspec refuses too: no model, fields that mean nothing to the method."""
        self.config, self.draft = config, draft
        row, model = choose(config, draft)
        check_fields(config, row)
        self.method = row.name
        self.has_draft = row.checkpoint is not None  # what drafts is a model, which draws
        self.model = model if self.has_draft else None
        self._warnings: list[FieldWarning] = []
        self._open = {field for field in type(config).model_fields if self.is_set(field)} - {"method", "model"}

    def is_set(self, field: str) -> bool:
        """Whether it has another value than its default."""
        return bool(getattr(self.config, field) != type(self.config).model_fields[field].default)

    def read(self, field: str) -> Any:
        """Its value, which the caller writes in the other server's words."""
        self._open.discard(field)
        return getattr(self.config, field)

    def read_plain(self, *fields: str) -> dict[str, Any]:
        """Those that are set, as JSON has them: the other server knows them by the same names and meanings."""
        return {field: _plain(self.read(field)) for field in fields if self.is_set(field)}

    def warn(self, field: str, effect: str, value: Any = None) -> None:
        """`value` is what an unset field means here."""
        self._open.discard(field)
        own = getattr(self.config, field)
        self._warnings.append(FieldWarning(field, value if own is None else own, effect))

    def warn_if_set(self, field: str, effect: str) -> None:
        if self.is_set(field):
            self.warn(field, effect)

    def close(self, server: str) -> list[FieldWarning]:
        """All warnings in the order of the fields, with one for each field that nobody took."""
        for field in self._open.copy():
            self.warn(field, f"not written: {server} has no such setting")
        order = list(type(self.config).model_fields)
        return sorted(self._warnings, key=lambda warning: order.index(warning.field))

    # -- what both servers need -----------------------------------------------------------------------------------

    def draft_len(self, server: str) -> int:
        """K, where the server needs to be told."""
        k: int | None = self.read("num_speculative_tokens")
        if k is None:
            raise ConfigError(
                f"num_speculative_tokens=None with method={self.method!r}: {server} needs a number; set it, to 3 for "
                "a start"
            )
        return k

    def gates(self) -> tuple[str, ...]:
        """Those of GATES that are set; all are taken."""
        return tuple(field for field in GATES if self.read(field) is not None)

    def warn_gates(self, gates: tuple[str, ...], why: str) -> None:
        for field in gates:
            self.warn(field, f"not written: {why}; num_speculative_tokens are drafted at every batch size")

    def has_both_engines(self) -> bool:
        """Whether the method exists with drafts inside the target's graph and beside it."""
        return {one_engine for method, one_engine, _, _ in MODE_OF if method == self.method} == {True, False}

    def in_parallel_anyway(self) -> bool:
        """Whether the method drafts in one pass over mask tokens whatever `parallel_drafting` says."""
        return all(MODE_OF[words].drafts_in_parallel() for words in MODE_OF if words[0] == self.method)

    def refuse(self, server: str, nearest: str) -> UnsupportedError:
        """The error for a method that the server does not have."""
        return UnsupportedError(f"method={self.method!r} has no equal in {server}; nearest: {nearest}")


def draft_len_steps(config: SpeculativeConfig, k: int) -> list[tuple[int | None, int]]:
    """K as a function of the requests that run: (largest batch size, draft length), rising; the last size is None.

    Neighbours differ in length. max_concurrency=n counts as {n: K}: as if max_num_tokens were no limit.
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
    """Tuples as lists; None, numbers and text as they are."""
    return json.loads(json.dumps(value))
