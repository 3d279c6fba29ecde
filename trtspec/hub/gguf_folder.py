"""The Hugging Face folder for a GGUF file: its texts are written once and kept, its tensors stay in the GGUF file."""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trtspec.errors import ConfigError
from trtspec.gguf.file import GgufFile, TensorEntry
from trtspec.gguf.folder import WEIGHTS, write_texts
from trtspec.gguf.names import hf_name, kept_linears
from trtspec.hub.file_lock import FileLock
from trtspec.hub.kept import (
    FILLING,
    FOLDER_VARIABLE,
    GGUF,
    LOCK,
    POLL,
    cache_folder,
    check_private,
    make_private,
)

logger = logging.getLogger(__name__)

_DIGITS = 24


def gguf_folder(file: Path, role: str = "target") -> Path:
    """Folder for an existing GGUF file; the same one for as long as the file does not change.

    The folder is in the folder of TRTSPEC_CACHE, and is not evicted while this process runs. With "off", it is a
    temporary folder of this process.
    Raises CheckpointError and UnsupportedError for the file, ConfigError if the folder cannot be used.
    """
    file = file.resolve()
    found = file.stat()
    return _folder(file, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns), role)[0]


@functools.lru_cache(maxsize=64)
def _folder(file: Path, stamp: tuple[int, ...], role: str) -> tuple[Path, FileLock | None]:
    """Return the folder, and the lock that keeps it from being evicted."""
    opened = GgufFile.open(file, role)
    try:
        kept = cache_folder()
        if kept is None:
            temporary = Path(tempfile.mkdtemp(prefix="trtspec-gguf-"))
            atexit.register(shutil.rmtree, temporary, ignore_errors=True)
            _fill(opened, temporary, role)
            return temporary, None
        make_private(kept)
        key = hashlib.sha256(repr((str(file), stamp, [code.read_bytes() for code in _code()])).encode())
        folder = kept / f"{GGUF}{key.hexdigest()[:_DIGITS]}"
        return folder, _used(opened, folder, role)
    except OSError as error:
        raise ConfigError(
            f"what {file} says cannot be written ({error}); set {FOLDER_VARIABLE} to a folder that can be"
        ) from error


def _used(file: GgufFile, folder: Path, role: str) -> FileLock | None:
    """Write the folder if it is missing, and return a lock on it; None where nothing can be written or removed."""
    while True:
        if not folder.exists():
            _make(file, folder, role)
        try:
            check_private(folder)
            lock = FileLock.acquire(folder / LOCK, shared=True)
            if lock is not None and lock.is_on(folder / LOCK):
                lock.touch()
                return lock
        except FileNotFoundError:  # it was just evicted
            continue
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return None
        time.sleep(POLL)


def _make(file: GgufFile, folder: Path, role: str) -> None:
    """Write the folder, whole or not at all."""
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=FILLING))
    try:
        made = staging / folder.name
        made.mkdir(mode=0o700)
        _fill(file, made, role)
        os.rename(made, folder)
    except OSError:
        if not folder.exists():  # or another process has made it meanwhile
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fill(file: GgufFile, folder: Path, role: str) -> None:
    config = write_texts(file, folder, role)
    (folder / WEIGHTS).symlink_to(file.path)
    kept = kept_linears(file)
    quantised = [
        entry
        for name, entry in file.tensors.items()
        if entry.kind.block > 1 and str(hf_name(name)).removesuffix(".weight") not in kept
    ]
    if quantised:
        logger.warning(
            "%s: %s are dequantised: in %s these weights take %.0f MB, %.0f in the file",
            file.path,
            ", ".join(dict.fromkeys(entry.kind.name for entry in quantised)),
            config["dtype"],
            sum(map(_elements, quantised)) * 2 / 1e6,
            sum(entry.nbytes for entry in quantised) / 1e6,
        )


def _elements(entry: TensorEntry) -> int:
    return entry.nbytes // entry.kind.block_bytes * entry.kind.block


def _code() -> Iterator[Path]:
    """Source files that determine the folder's content."""
    yield from sorted((Path(__file__).resolve().parents[1] / "gguf").glob("*.py"))
