"""The target's states of a run's windows, kept on disk, so that epochs after the first need not compute them again."""

from __future__ import annotations

import logging
import os
import zlib
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

States = tuple[Tensor, Tensor, Tensor]
"""A window's best [S] int64, captured [S, n * Ht] and last [S, Ht], as in training_batches.TrainingBatch."""

_PRESENT = 1 << 32  # bit of a window's mark, above the checksum of its bytes


class KeptStates:
    """A store of the states of at most `count` windows of S rows, in `folder`.

    `{name}.bin` has their bytes, `{name}.crc` a mark for each window. A torn or damaged window does not match its mark,
    and counts as absent.

    A full or failing disk costs only the time to compute states: from then on nothing more is kept, with a warning.
    """

    def __init__(
        self, folder: Path, name: str, count: int, seq_len: int, widths: tuple[int, int], dtype: torch.dtype
    ) -> None:
        """Open the files, or create them. widths: n * Ht and Ht."""
        self.count, self.seq_len, self.widths, self.dtype = count, seq_len, widths, dtype
        self.num_bytes = bytes_per_window(seq_len, widths, dtype)
        self._writable = True
        self._files: list[FileIO] = []
        self._marks = np.zeros(count, dtype=np.uint64)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for kind in ("bin", "crc"):
                file = os.open(folder / f"{name}.{kind}", os.O_RDWR | os.O_CREAT, 0o644)
                self._files.append(FileIO(file, "r+"))
            marks = os.pread(self._files[1].fileno(), 8 * count, 0)
            whole = len(marks) // 8
            self._marks[:whole] = np.frombuffer(marks[: 8 * whole], dtype=np.uint64)
        except OSError as error:
            self._give_up(error)

    def get(self, index: int) -> States | None:
        """Return the states of window `index`; None if they are not kept."""
        if index >= self.count or not self._marks[index]:
            return None
        try:
            data = os.pread(self._files[0].fileno(), self.num_bytes, index * self.num_bytes)
        except OSError:
            return None
        if len(data) != self.num_bytes or zlib.crc32(data) | _PRESENT != int(self._marks[index]):
            return None
        raw, size, seq = torch.frombuffer(bytearray(data), dtype=torch.uint8), self.dtype.itemsize, self.seq_len
        sizes = [4 * seq, size * seq * self.widths[0], size * seq * self.widths[1]]
        best, captured, last = torch.split(raw, sizes)
        return (
            best.view(torch.int32).long(),
            captured.view(self.dtype).view(seq, -1),
            last.view(self.dtype).view(seq, -1),
        )

    def put(self, index: int, states: States) -> None:
        """Keep the states of window `index`, if there is room."""
        if index >= self.count or not self._writable:
            return
        best, captured, last = states
        parts = (best.to(torch.int32), captured.to(self.dtype), last.to(self.dtype))
        data = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
        mark = zlib.crc32(data) | _PRESENT
        try:
            _write(self._files[0], data, index * self.num_bytes)
            _write(self._files[1], np.uint64(mark).tobytes(), 8 * index)
        except OSError as error:
            self._give_up(error)
            return
        self._marks[index] = mark

    @property
    def num_kept(self) -> int:
        return int(np.count_nonzero(self._marks))

    def _give_up(self, error: OSError) -> None:
        self._writable = False
        logger.warning("the target's states are not kept any more (%s): it computes them again in each epoch", error)


def bytes_per_window(seq_len: int, widths: tuple[int, int], dtype: torch.dtype) -> int:
    """Number of bytes that the states of a window of S rows take on disk. widths: n * Ht and Ht."""
    return seq_len * (4 + dtype.itemsize * sum(widths))


def _write(file: FileIO, data: bytes, place: int) -> None:
    if os.pwrite(file.fileno(), data, place) != len(data):
        raise OSError("the disk took only a part of it")
