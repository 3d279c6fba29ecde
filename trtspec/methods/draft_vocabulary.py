"""The tables d2t and t2d, which map the ids of a draft vocabulary to the target's.

EAGLE3 checkpoints and other checkpoints in vLLM's layouts have them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtspec.errors import WeightsError

TABLES = ("d2t", "t2d")
"""Names of the tables. d2t [Vd] integers: target id = draft id + d2t. t2d [V]: whether a target id has a draft id."""


def ids_of_tables(tables: Mapping[str, Tensor], size: int, vocab: int, where: str, reads_values: bool) -> Tensor | None:
    """Return the target's id of each draft id, [size] int64; None if `reads_values` is False.

    tables: those of d2t and t2d that the checkpoint has. size: number of ids in the draft vocabulary. vocab: number of
    the target's ids. where: the beginning of error messages. reads_values: False = only shapes are checked. Raises
    WeightsError for a missing d2t, for other shapes, for impossible ids, and for tables that disagree.
    """
    offsets, used = tables.get("d2t"), tables.get("t2d")
    if offsets is None and size != vocab:
        raise WeightsError(
            f"{where}: d2t ({size},) is missing; a draft vocabulary of {size} ids for a target's {vocab} needs it"
        )
    if offsets is not None and offsets.shape != (size,):
        raise WeightsError(f"{where}: d2t is {tuple(offsets.shape)}, expected ({size},) of integers")
    if used is not None and used.shape != (vocab,):
        raise WeightsError(f"{where}: t2d is {tuple(used.shape)}, expected ({vocab},)")
    if not reads_values:
        return None
    ids = torch.arange(size) if offsets is None else _checked_ids(offsets, vocab, where)
    if used is not None and not torch.equal(used.bool().nonzero()[:, 0], ids.sort().values):
        raise WeightsError(f"{where}: t2d and d2t name different tokens; they must come from the same training run")
    return ids


def _checked_ids(d2t: Tensor, vocab: int, where: str) -> Tensor:
    """Convert d2t [Vd] of any integer dtype to ids [Vd] int64, distinct and less than `vocab`."""
    if d2t.is_floating_point():
        raise WeightsError(f"{where}: d2t is {tuple(d2t.shape)} {d2t.dtype}, expected {tuple(d2t.shape)} of integers")
    ids = torch.arange(len(d2t)) + d2t.long()
    bad = ((ids < 0) | (ids >= vocab)).nonzero()
    if len(bad):
        i = int(bad[0])
        raise WeightsError(
            f"{where}: d2t[{i}] = {int(d2t[i])} makes draft id {i} the target's {int(ids[i])}; ids are "
            f"0..{vocab - 1}. Check that d2t holds offsets (target id - draft id) for this target"
        )
    firsts: dict[int, int] = {}
    for i, token in enumerate(ids.tolist()):
        if firsts.setdefault(token, i) != i:
            raise WeightsError(
                f"{where}: d2t gives the draft ids {firsts[token]} and {i} the same target id {token}; it must be one "
                "to one. Check that d2t holds offsets (target id - draft id), not ids"
            )
    return ids
