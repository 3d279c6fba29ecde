"""A lock on a file, which ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from typing_extensions import Self


class FileLock:
    """An flock on an open file, until release() or until nobody has the object any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, file: Path, *, shared: bool = False, make: bool = True) -> Self | None:
        """The lock on `file`, None where others hold it so that it cannot be had. It does not wait.

        make: the file is made where it is missing, readable by its owner alone. OSError where it cannot be opened, a
        link included.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
        lock = cls(os.open(file, flags, 0o600))
        try:
            fcntl.flock(lock.descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.release()
            return None
        return lock

    @property
    def descriptor(self) -> int:
        """The open file's descriptor."""
        assert self._descriptor is not None
        return self._descriptor

    def is_on(self, file: Path) -> bool:
        """Whether `file` still is what was locked: meanwhile it may have been removed, or made anew."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), file.lstat())
        except FileNotFoundError:
            return False

    def note(self, text: str) -> None:
        """Write into the file; it is no loss where that fails."""
        with suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, text.encode(), 0)

    def touch(self) -> None:
        """The file was used now."""
        os.utime(self.descriptor)

    def release(self) -> None:
        """Give it up; once is enough."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()
