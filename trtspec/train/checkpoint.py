"""Checkpoints of a run in progress. A kill at any moment costs at most the steps since the last checkpoint."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from trtspec.errors import CheckpointError

logger = logging.getLogger(__name__)

KEPT = 2
"""Number of checkpoints kept. If a failing disk damages the newest one, the one before it is loaded."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write the whole file or nothing: write it next to `path`, flush it to disk, rename it over `path`."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write `folder/step-XXXXXXXX.pt` whole or not at all, then delete all but the newest KEPT checkpoints."""
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
    """Return the newest readable state, or None if there is no checkpoint yet.

    A damaged checkpoint is reported and skipped. Raises CheckpointError if checkpoints exist and none can be read,
    because starting over silently would throw a run away.
    """
    candidates = _newest_first(folder)
    for path in candidates:
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return state
        except Exception as error:  # torch.load raises many kinds of errors for a damaged file
            logger.warning("checkpoint %s is damaged (%s); trying the one before it", path, error)
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {folder} can be read; delete the folder to start over"
        )
    return None


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"), reverse=True)
