"""SAVE_HIDDEN_STATES: writes the target's hidden states of every finished request to files.

methods/hidden_states/shards.py has the format of the files.

What is kept: a request counts if it has ended by itself ("stop", "length"). The states of its rows, prompt and output
up to the token before the last, lie in memory until `write_interval` requests make a shard. flush() writes the rest.
`LLM.shutdown()` calls it, and so does the end of the interpreter or of a forgotten LLM. A kill therefore costs at most
the requests since the last shard. Aborted and failed requests are not saved: they are not what was asked for.

If the disk is full or fails, finished shards stay as they are, and generation goes on. The error is logged once and
stands in the engine's stats. The requests in question are tried again together with the next ones. Memory does not fill
up instead: at most twice `write_interval` requests ever wait, and the oldest are given up and counted. flush() and
shutdown() try once more, and raise EngineError if requests are lost or still wait.
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
    """A writer of finished requests into `folder`, which it owns until close().

    Raises ConfigError if the folder cannot be used: it holds shards of another kind or files that are no shards, or
    another engine writes there. Numbering goes on after the shards that are there.
    """

    def __init__(self, folder: Path, prefix: str, write_interval: int, metadata: ShardMetadata) -> None:
        self.folder, self.prefix, self.write_interval, self.metadata = folder, prefix, write_interval, metadata
        self.waiting: list[States] = []
        self.num_saved = 0  # requests, since the start
        self.num_lost = 0
        self.error: str | None = None  # the first error of writing
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
        """Queue a request, and write a shard with every write_interval-th. Disk errors do not raise."""
        self.waiting.append(states)
        self._countdown -= 1
        if self._countdown == 0 and not self._write_all():
            lost = max(len(self.waiting) - self.write_interval, 0)
            self.num_lost += lost
            del self.waiting[:lost]

    def flush(self) -> None:
        """Write all requests that wait. EngineError if that fails, or if requests were lost since the start."""
        self._write_all()
        if self.waiting or self.num_lost:
            raise EngineError(
                f"hidden states of {self.num_lost} requests are lost and {len(self.waiting)} still wait, "
                f"{self.num_saved} are saved in {self.folder}: {self.error}"
            )

    def close(self) -> None:
        """Unlock the folder, so that others can write there. Nothing is flushed."""
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
        """Write all requests that wait. False: the disk failed, and those that were not written still wait."""
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
    """A collector of the hidden states of all rows. It passes those of finished requests to `writer`."""

    def __init__(self, writer: ShardWriter) -> None:
        self.writer = writer
        self._rows = RowStates()
        # if close() is never called: runs at the latest when the interpreter ends
        self._finalizer = weakref.finalize(self, _finish, writer)

    def collect(self, batch: Batch, states: Tensor) -> None:
        """Collect the states [T, n * H + H] of a step's packed rows. Call this before the step is committed."""
        self._rows.collect(batch, states.cpu())

    def ended(self, request: Request) -> None:
        """Queue the committed rows of a request, if it ended by itself. Call this before its KV is released."""
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
        """Write all finished requests that wait; errors as in ShardWriter.flush."""
        self.writer.flush()

    def close(self) -> None:
        """Flush, then unlock the folder. EngineError as in flush(). Further calls do nothing."""
        if self._finalizer.detach() is not None:
            try:
                self.writer.flush()
            finally:
                self.writer.close()


def _finish(writer: ShardWriter) -> None:
    try:
        writer.flush()
    except EngineError as error:  # no caller is left to catch it
        logger.error("%s", error)
    finally:
        writer.close()
