"""Checkpoints of a run in progress, made so that a kill at any moment costs at most the steps since the last one."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from trtspec.errors import CheckpointError

logger = logging.getLogger(__name__)

KEPT = 2
"""The newest may be damaged by a failing disk; then the one before it serves."""


def write_atomically(path: Path, data: bytes) -> None:
    """Whole file or none: written beside `path`, flushed to disk, renamed over it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes `folder/step-XXXXXXXX.pt` whole or not at all, then drops all but the newest KEPT."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    for old in _newest_first(folder)[KEPT:]:
        old.unlink()


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The newest readable state, or None where there is no checkpoint yet.

    A damaged one is reported and skipped. Raises CheckpointError when checkpoints exist and none can be read: starting
    over silently would throw a run away.
    """
    candidates = _newest_first(folder)
    for path in candidates:
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return state
        except Exception as error:  # torch.load raises many kinds for a damaged file
            logger.warning("checkpoint %s is damaged (%s); trying the one before it", path, error)
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {folder} can be read; delete the folder to start over"
        )
    return None


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"), reverse=True)
