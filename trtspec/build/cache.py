"""The cache of compiled engines: a folder that only this user can access, with one engine folder for each key.

    KEY/                an engine folder, which also contains:
        .lock           held, shared, by every process that runs the engine; its time of change is the last use
        cache.json      the facts that the key is the digest of, and the checkpoint that the engine was built from
    gguf-*/             the folder for a GGUF file (hub/gguf_folder.py), with a .lock of the same meaning
    building-KEY/       an engine that is being built, or was when its process died
    removed-*/          an engine that is being removed
    KEY.lock            held by the process that builds KEY; contains that process's id
    index.json          the digests of cache_key.Digests

Weights that are equal in several engines are one file with several names. The folder is bounded in bytes;
folders for GGUF files count, and are evicted, as engines are.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from trtspec.build.engine_folder import EngineFolder
from trtspec.errors import CheckpointError, ConfigError
from trtspec.gguf.folder import WEIGHTS
from trtspec.hub.file_lock import FileLock
from trtspec.hub.kept import FILLING, GGUF, LOCK, POLL, cache_folder, check_private, make_private

logger = logging.getLogger(__name__)

SIZE_VARIABLE = "TRTSPEC_CACHE_GB"
GIGABYTES = 20.0
"""Bound of all that is kept, in units of 10^9 bytes, if SIZE_VARIABLE is not set."""
_BUILDING, _REMOVED, _FACTS = "building-", "removed-", "cache.json"


@dataclass(frozen=True)
class Held:
    """An engine of the cache. It is not evicted before release()."""

    engine: EngineFolder
    lock: FileLock

    def release(self) -> None:
        """End the use of the engine."""
        self.lock.release()


@dataclass(frozen=True)
class Kept:
    """The facts of an engine, or of a GGUF file's folder, that are known without using it.

    size: bytes, shared weights included. last_used: seconds since 1970. facts: cache.json, empty if it cannot be
    read; of a GGUF file, the path.
    """

    path: Path
    size: int
    last_used: float
    in_use: bool
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Cache:
    """The cache's folder, and its bound in bytes."""

    folder: Path
    limit: int

    @classmethod
    def of_environment(cls) -> Self | None:
        """Cache that TRTSPEC_CACHE and TRTSPEC_CACHE_GB describe; None for "off".

        ConfigError for a size that is no positive number. OSError if the user has no home folder and names no folder.
        """
        folder = cache_folder()
        if folder is None:
            return None
        said = os.environ.get(SIZE_VARIABLE) or str(GIGABYTES)
        try:
            size = float(said)
        except ValueError:
            size = math.nan
        if not 0 < size * 1e9 < math.inf:
            raise ConfigError(f"{SIZE_VARIABLE} = {said!r} is no size; set it to gigabytes, such as {GIGABYTES:g}")
        return cls(folder, int(size * 1e9))

    def open(self) -> None:
        """Create the folder, or check that only this user can access it.

        ConfigError if others can access it; OSError if it cannot be created.
        """
        make_private(self.folder)

    def held(self, key: str) -> Held | None:
        """Return the engine of `key`, None if there is none.

        CheckpointError for a damaged engine. ConfigError for a folder that others can write to.
        """
        path = self.folder / key
        while os.path.lexists(path):
            check_private(path)
            try:
                lock = FileLock.acquire(path / LOCK, shared=True, make=False)
            except FileNotFoundError as error:
                raise CheckpointError(f"engine {path}: {LOCK} is missing; rebuild it") from error
            if lock is None:  # held for a moment, to evict the engine or to test its use
                time.sleep(POLL)
                continue
            try:
                if not lock.is_on(path / LOCK):
                    continue
                engine = EngineFolder.open(path)
                if engine is None:
                    raise CheckpointError(f"engine {path}: config.json cannot be read; rebuild it")
                engine.check()
                lock.touch()
                held, lock = Held(engine, lock), None
                return held
            finally:
                if lock is not None:
                    lock.release()
        return None

    def get(
        self,
        key: str,
        facts: Mapping[str, Any],
        build: Callable[[Path], None],
        wait: Callable[[str], None] = lambda what: None,
    ) -> Held:
        """Return the engine of `key`, built first if it is missing or damaged.

        build: makes the engine folder at the path that it is given. What it raises is passed on, and nothing of the
        build is left. wait: is called with a line that names the building process. One process builds, others wait.
        """
        try:
            if (found := self.held(key)) is not None:
                return found
        except CheckpointError as error:
            logger.warning("%s; it is compiled anew", str(error).partition(";")[0])
        builder = self._builder(key, wait)
        try:
            try:
                found = self.held(key)  # built by another process meanwhile
            except CheckpointError:
                self._remove(self.folder / key)
                found = None
            self._sweep(key)
            if found is None:
                found = self._built(key, facts, build)
        finally:
            builder.release()
        self.evict()
        return found

    def discard(self, key: str) -> None:
        """Remove an engine, even one in use: the processes that use it have loaded it."""
        self._remove(self.folder / key)

    def kept(self) -> list[Kept]:
        """Engines and folders for GGUF files, the least recently used first."""
        found = []
        for path in self._paths():
            try:
                lock = FileLock.acquire(path / LOCK, make=_is_gguf(path))  # older versions made none for GGUF files
                last_used = (path / LOCK).lstat().st_mtime
            except OSError:
                continue  # it was just removed
            if lock is not None:
                lock.release()
            found.append(Kept(path, _size_of(path), last_used, lock is None, _facts(path)))
        return sorted(found, key=lambda kept: kept.last_used)

    def size(self) -> int:
        """Bytes of all that is kept; a file with several names counts once."""
        return _size_of(*self._paths())

    def evict(self, limit: int | None = None) -> list[Path]:
        """Remove engines and folders for GGUF files, the least recently used first, and return their folders.

        It ends when at most `limit` bytes are left (None: the cache's bound), or when all that is left is in use.
        """
        most, gone = self.limit if limit is None else limit, []
        for kept in self.kept():
            if self.size() <= most:
                break
            try:
                lock = FileLock.acquire(kept.path / LOCK, make=False)
            except OSError:
                continue
            if lock is not None:
                self._remove(kept.path)
                lock.release()
                gone.append(kept.path)
        return gone

    # -- one engine ---------------------------------------------------------------------------------------------------

    def _builder(self, key: str, wait: Callable[[str], None]) -> FileLock:
        """Wait for the lock that gives the right to build an engine, and return it."""
        file, since, told = self.folder / f"{key}.lock", time.monotonic(), False
        while True:
            lock = FileLock.acquire(file)
            if lock is not None:
                lock.note(str(os.getpid()))
                return lock
            if not told and time.monotonic() - since > 1.0:
                told = True
                wait(f"process {file.read_text() or '(unknown)'} compiles this engine; waiting for it")
            time.sleep(POLL)

    def _built(self, key: str, facts: Mapping[str, Any], build: Callable[[Path], None]) -> Held:
        staging = self.folder / f"{_BUILDING}{key}"
        made, path = staging / "engine", self.folder / key
        try:
            staging.mkdir(mode=0o700)
            build(made)
            (made / _FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            lock = FileLock.acquire(made / LOCK, shared=True)
            assert lock is not None
            self._share_weights(made)
            made.chmod(0o700)
            os.rename(made, path)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        engine = EngineFolder.open(path)
        assert engine is not None
        return Held(engine, lock)

    def _share_weights(self, made: Path) -> None:
        """Replace weight files of other engines that equal one of the new engine's by links to the new file.

        The new file is the one to keep, as its contents are known.
        """
        ours = {facts["sha256"]: made / name for name, facts in _weights(made)}
        for other in self._paths():
            for name, facts in _weights(other):
                file, same = other / name, ours.get(facts["sha256"])
                if same is None or not file.is_file() or file.samefile(same):
                    continue
                link = made.parent / "link"
                with suppress(OSError):  # on a file system without links they stay several files
                    os.link(same, link)
                    os.replace(link, file)

    def _paths(self) -> list[Path]:
        """Folders of the engines and for GGUF files."""
        try:
            paths = [*self.folder.iterdir()]
        except FileNotFoundError:
            return []
        return [path for path in paths if _is_gguf(path) or ("-" not in path.name and (path / LOCK).is_file())]

    # -- what is left over --------------------------------------------------------------------------------------------

    def _remove(self, path: Path) -> None:
        """Remove an engine's folder. For other processes it is gone at once."""
        away = self.folder / f"{_REMOVED}{secrets.token_hex(8)}"  # no folder around it: a full disk has no room for one
        with suppress(FileNotFoundError):
            os.rename(path, away)
            shutil.rmtree(away, ignore_errors=True)

    def _sweep(self, key: str) -> None:
        """Remove what is left of processes that died in a build or a removal. The caller holds the lock on `key`."""
        for path in self.folder.glob(f"{_REMOVED}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{FILLING}*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > 3600:
                    shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{_BUILDING}*"):
            theirs = path.name.removeprefix(_BUILDING)
            lock = None if theirs == key else FileLock.acquire(self.folder / f"{theirs}.lock")
            if theirs == key or lock is not None:
                shutil.rmtree(path, ignore_errors=True)
            if lock is not None:
                lock.release()


def _weights(engine: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and facts of each weight file of an engine; none for an engine that cannot be read."""
    try:
        found = EngineFolder.open(engine)
    except CheckpointError:
        return
    for name, facts in {} if found is None else found.data["files"].items():
        if name.endswith(".safetensors"):
            yield name, facts


def _size_of(*folders: Path) -> int:
    sizes: dict[tuple[int, int], int] = {}
    for folder in folders:
        for where, _, names in os.walk(folder):
            for name in names:
                try:
                    found = os.lstat(os.path.join(where, name))
                except OSError:
                    continue
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def _is_gguf(path: Path) -> bool:
    return path.name.startswith(GGUF)


def _facts(engine: Path) -> Mapping[str, Any]:
    try:
        if _is_gguf(engine):
            return {"model": os.readlink(engine / WEIGHTS), "holds": "settings and tokenizer of a GGUF file"}
        data = json.loads((engine / _FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
