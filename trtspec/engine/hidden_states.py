"""SAVE_HIDDEN_STATES: the target's hidden states of every finished request, in files (see
methods/hidden_states/shards.py).

What is kept. A request counts once it has ended by itself ("stop", "length"): then its rows, prompt and output up to
the token before the last, lie in memory until `write_interval` requests make a shard. The rest is written by flush(),
which `LLM.shutdown()` calls, and so do the end of the interpreter and of a forgotten LLM. A kill therefore costs at
most the requests since the last shard. Aborted and failed requests are not saved: they are not what was asked for.

A disk that is full or fails. Shards that are finished stay as they are, and generation goes on. The error is logged
once and stands in the engine's stats; the requests in question are tried again together with the next ones. So that
memory does not fill up instead, no more than twice `write_interval` requests ever wait; the oldest are given up and
counted. flush() and shutdown() try once more and raise EngineError where requests are lost or still wait.
"""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor

from trtspec.engine.request import Request
from trtspec.engine.row_states import RowStates
from trtspec.engine.scheduler import Batch
from trtspec.errors import CheckpointError, ConfigError, EngineError
from trtspec.methods.hidden_states.shards import (
    ShardMetadata,
    States,
    leftovers,
    next_index,
    shard_path,
    shards_of,
    write_shard,
)

logger = logging.getLogger(__name__)


class ShardWriter:
    """Finished requests on their way into `folder`, which belongs to it until close().

    Raises ConfigError where the folder cannot be used: it holds shards of another kind, or files that are no shards, or
    another engine is writing there. Numbering goes on after the shards that are there.
    """

    def __init__(self, folder: Path, prefix: str, write_interval: int, metadata: ShardMetadata) -> None:
        self.folder, self.prefix, self.write_interval, self.metadata = folder, prefix, write_interval, metadata
        self.waiting: list[States] = []
        self.num_saved = 0  # requests, since the start
        self.num_lost = 0
        self.error: str | None = None  # the first that writing met
        self._countdown = write_interval  # finished requests until the next attempt
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"output_directory={str(folder)!r} cannot be used ({error}); give another") from error
        try:
            self._claim()
        except BaseException:
            self.close()
            raise

    def add(self, states: States) -> None:
        """Queue a request; with every write_interval-th a shard is written. Never raises for the disk."""
        self.waiting.append(states)
        self._countdown -= 1
        if self._countdown == 0 and not self._write_all():
            lost = max(len(self.waiting) - self.write_interval, 0)
            self.num_lost += lost
            del self.waiting[:lost]

    def flush(self) -> None:
        """Write all that waits. EngineError where that fails, or where requests were lost since the start."""
        self._write_all()
        if self.waiting or self.num_lost:
            raise EngineError(
                f"hidden states of {self.num_lost} requests are lost and {len(self.waiting)} still wait, "
                f"{self.num_saved} are saved in {self.folder}: {self.error}"
            )

    def close(self) -> None:
        """Let others write in the folder. Nothing is flushed."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _claim(self) -> None:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"output_directory={str(self.folder)!r}: another engine writes there; shut it down, or give another"
            ) from error
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s); let no other engine write there", self.folder, error)
        for path in shards_of(self.folder):
            try:
                theirs, _ = ShardMetadata.of(path)
            except CheckpointError as error:
                raise ConfigError(f"output_directory={str(self.folder)!r}: {error}") from error
            if theirs != self.metadata:
                raise ConfigError(
                    f"output_directory={str(self.folder)!r} holds {path.name} with {theirs}, and this run makes "
                    f"{self.metadata}; use another folder"
                )
        for path in leftovers(self.folder, self.prefix):
            logger.warning("removing %s, which was never finished", path)
            try:
                path.unlink()
            except OSError as error:
                raise ConfigError(
                    f"output_directory={str(self.folder)!r}: {path.name}, which was never finished, cannot be removed "
                    f"({error}); remove it, or use another folder"
                ) from error
        self._index = next_index(self.folder, self.prefix)

    def _write_all(self) -> bool:
        """False where the disk does not take it; what was not written still waits."""
        self._countdown = self.write_interval
        while self.waiting:
            batch = self.waiting[: self.write_interval]
            try:
                write_shard(shard_path(self.folder, self.prefix, self._index), self.metadata, batch)
            except OSError as error:
                self._report(error)
                return False
            self._index += 1
            self.num_saved += len(batch)
            del self.waiting[: len(batch)]
        return True

    def _report(self, error: OSError) -> None:
        if self.error is None:
            self.error = f"EngineError: hidden states cannot be written to {self.folder}: {error}; free space there"
            logger.error("%s; finished shards are kept and generation goes on", self.error)


class HiddenStateCollector:
    """What the loop tells of rows and requests; finished requests go to `writer`."""

    def __init__(self, writer: ShardWriter) -> None:
        self.writer = writer
        self._rows = RowStates()
        # in case nobody calls close(): at the latest when the interpreter ends
        self._finalizer = weakref.finalize(self, _finish, writer)

    def collect(self, batch: Batch, states: Tensor) -> None:
        """Before a step is committed: states [T, n * H + H] of its packed rows."""
        self._rows.collect(batch, states.cpu())

    def ended(self, request: Request) -> None:
        """Before its KV is released: queue what was committed, if the request ended by itself."""
        length = min(request.kv.committed, len(request.tokens))
        states = self._rows.rows(request, 0, length)
        self._rows.forget(request)
        if request.finish_reason not in ("stop", "length") or not length:
            return
        assert states is not None, f"request {request.request_id}: not all of {length} rows"
        hidden_size = self.writer.metadata.hidden_size
        ids = torch.tensor(request.tokens[:length])
        self.writer.add(States(ids, states[:, :-hidden_size], states[:, -hidden_size:]))

    def flush(self) -> None:
        """See ShardWriter.flush."""
        self.writer.flush()

    def close(self) -> None:
        """Flush, then give the folder free. EngineError as flush(). Further calls do nothing."""
        if self._finalizer.detach() is not None:
            try:
                self.writer.flush()
            finally:
                self.writer.close()


def _finish(writer: ShardWriter) -> None:
    try:
        writer.flush()
    except EngineError as error:  # nobody is left to catch it
        logger.error("%s", error)
    finally:
        writer.close()
