"""A lock on a file. It ends with the process that holds it, however that process ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from typing_extensions import Self


class FileLock:
    """An flock on an open file, held until release() or until no reference to the object is left."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, file: Path, *, shared: bool = False, make: bool = True) -> Self | None:
        """Return the lock on `file`, or None if another holder's lock excludes it. It does not wait.

        make: create the file if it is missing, readable by its owner alone. OSError if `file` cannot be opened, or is a
        link.
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
        """Whether `file` still is the locked file: it may have been removed or created anew since."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), file.lstat())
        except FileNotFoundError:
            return False

    def note(self, text: str) -> None:
        """Write `text` into the file. A failure is ignored, as it does no harm."""
        with suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, text.encode(), 0)

    def touch(self) -> None:
        """Set the file's times to now, the time of its last use."""
        os.utime(self.descriptor)

    def release(self) -> None:
        """Release the lock. Further calls have no effect."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()
