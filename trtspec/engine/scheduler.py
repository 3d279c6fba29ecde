"""Decides which requests run in the next step, and with how many rows. It reserves their KV before the launch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from trtspec.engine.request import Request
from trtspec.kv.blocks import BlockAllocator, SequenceKV
from trtspec.kv.reuse import PrefixReuse


class Scheduled(NamedTuple):
    """One request's part of a step: num_rows rows after its scheduled tokens, the last draft_len of them drafts."""

    request: Request
    num_rows: int
    draft_len: int
    is_context: bool

    @property
    def end(self) -> int:
        """Tokens of the sequence, these rows included, if every draft in flight is accepted."""
        return self.request.num_scheduled_tokens + self.num_rows

    @property
    def emits(self) -> bool:
        """Whether the step draws a token for the request: not for a context chunk that is not the last."""
        return self.end >= len(self.request.tokens)


Batch = tuple[Scheduled, ...]
"""Rows of a step by request: contexts first, then generations."""


class Scheduler:
    """A first-come, first-served scheduler: the oldest requests get blocks first.

    If blocks run short, the newest requests wait and are computed again later.
    `num_draft_tokens`: number of KV rows reserved after those of a step, for drafting and the next step's drafts.
    `reuse`: shares blocks between requests, None = blocks are not shared. `forks_draft_kv`: samples of a prompt share
    only rows that have draft KV, as it cannot be computed later. `provisional`: number of last rows that are computed
    again, see kv.reuse. `branch_rows`: number of rows past a request's length limit that a draft tree may need, as its
    branches have rows of their own.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        max_batch_size: int,
        max_num_tokens: int,
        num_draft_tokens: int,
        reuse: PrefixReuse | None = None,
        forks_draft_kv: bool = False,
        provisional: int = 0,
        branch_rows: int = 0,
    ) -> None:
        self.allocator = allocator
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.num_draft_tokens = num_draft_tokens
        self.reuse = reuse
        self.forks_draft_kv = forks_draft_kv
        self.provisional = provisional
        self.branch_rows = branch_rows
        # Whether a request may take over only rows with draft KV, because it cannot be computed for them later.
        self.wants_draft_kv: Callable[[Request], bool] = lambda request: True
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.siblings: dict[int, list[Request]] = {}  # leader's id -> samples that wait for its prefill
        self.finished_in_flight: list[Request] = []  # ended, but in a step in flight, which writes to their blocks
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Number of samples that do not run yet, or were preempted."""
        return len(self.waiting) + sum(map(len, self.siblings.values()))

    @property
    def kv_used(self) -> float:
        """Share of the cache's blocks that requests hold, 0 to 1."""
        return 1 - self.allocator.num_free * self.allocator.block_size / self.allocator.capacity

    def add(self, request: Request, siblings: list[Request]) -> None:
        """Queue a request. Its siblings share the blocks of its prompt after the prefill."""
        self.waiting.append(request)
        if siblings:
            self.siblings[request.request_id] = siblings

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.finished_in_flight)

    def live(self) -> Iterator[SequenceKV]:
        """KV of every sequence that may hold blocks."""
        return (request.kv for request in (*self.running, *self.waiting, *self.finished_in_flight))

    def schedule(self) -> Batch | None:
        """Reserve the KV of the next step and return its batch, which is empty if there is nothing to do.

        With a step in flight, it reserves as if all drafts of that step were accepted. A request that has more blocks
        than it needs loses nothing. None: there are too few blocks for that; complete the step, then call this again.
        """
        contexts: list[Scheduled] = []
        generations: list[Scheduled] = []
        # Every running generation gets its rows; contexts share the rest of max_num_tokens.
        running = [(request, request.is_context) for request in self.running if not request.will_finish]
        room = self.max_num_tokens - sum([1 + request.num_drafts for request, is_context in running if not is_context])
        num_preemptions, ahead, block_size = self.num_preemptions, self.num_draft_tokens, self.allocator.block_size
        for request, is_context in running:
            if num_preemptions != self.num_preemptions and request not in self.running:
                continue  # preempted for an older request, earlier in this loop
            rows = min(request.num_uncomputed, room) if is_context else 1 + request.num_drafts
            if rows == 0:
                continue
            # most steps fit into the blocks that the request holds, and reserve none
            if request.num_scheduled_tokens + rows + ahead > len(request.kv.blocks) * block_size and not self._reserve(
                request, rows
            ):
                if self._in_flight:
                    return None
                if not self._take_from_others(request, rows):
                    continue
            if is_context:
                contexts.append(Scheduled(request, rows, 0, True))
                room -= rows
            else:
                num_drafts = request.num_drafts  # 0 if there was no room for them
                generations.append(Scheduled(request, 1 + num_drafts, num_drafts, False))
        if self.waiting and len(self.running) < self.max_batch_size and room > 0:
            self._publish(self.running)  # only when a request may take blocks over: hashing takes time
        while self.waiting and len(self.running) < self.max_batch_size and room > 0:
            if num_preemptions != self.num_preemptions:
                break  # a request that was just preempted must not take the room that it freed
            request = self.waiting[0]
            rows = self._admit(request, room)
            if rows == 0:
                # Every request fits alone. If none runs, only blocks of waiting samples can be in the way.
                if self.running or not self._drop_waiting_blocks():
                    break
                continue
            self.running.append(self.waiting.popleft())
            contexts.append(Scheduled(request, rows, 0, True))
            room -= rows
        return (*contexts, *generations)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserve blocks for the first `num_tokens` tokens, but none past the request's limit.

        False, and nothing changed, if there are not enough.
        While many blocks are free it reserves a few more, so that not every step has to reserve.
        """
        # no row past it is needed; a context has no drafts
        allocator, most = self.allocator, request.length_limit + (0 if request.is_context else self.branch_rows)
        if allocator.num_free > _PLENTY * self.max_batch_size:
            more = num_tokens + _SPARE_BLOCKS * allocator.block_size
            if allocator.reserve(request.kv, min(more, most)):
                return True
        return allocator.reserve(request.kv, min(num_tokens, most))

    def release_siblings(self, leader: Request) -> None:
        """Queue the siblings of a leader that has prefilled its prompt, or has ended.

        They share its full blocks, unless they are to compute every row.
        """
        for sibling in reversed(self.siblings.pop(leader.request_id, [])):
            if sibling.reuses_prefix:
                shared = max(leader.prompt_len - 1 - self.provisional, 0)  # one row is always computed
                if self.forks_draft_kv and self.wants_draft_kv(sibling):
                    shared = min(shared, leader.kv.draft_kv_len)
                sibling.kv = self.allocator.fork(leader.kv, shared)
            self.waiting.appendleft(sibling)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended. Its blocks become free, or stay published until they are evicted."""
        self.release_siblings(request)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._publish([request])
        if request.pending:
            self.finished_in_flight.append(request)
        else:
            self.allocator.release(request.kv)

    def mark_in_flight(self, batch: Batch, num_drafts: Sequence[int]) -> None:
        """Record that the batch is in flight. num_drafts: number of drafts that it makes for each request."""
        for row, drafts in zip(batch, num_drafts, strict=True):
            row.request.pending += row.num_rows
            row.request.pending_drafts = drafts
            self.allocator.pin(row.request.kv)

    def mark_completed(self, batch: Batch) -> None:
        """Record that the batch is no longer in flight. Its verdict is committed afterwards."""
        for row in batch:
            row.request.pending -= row.num_rows
            self.allocator.unpin(row.request.kv)
        for request in [request for request in self.finished_in_flight if not request.pending]:
            self.finished_in_flight.remove(request)
            self.allocator.release(request.kv)

    def drop_sibling(self, request: Request) -> bool:
        """Forget a sample that still waits for its leader's prefill; False if it is not one."""
        for siblings in self.siblings.values():
            if request in siblings:
                siblings.remove(request)
                return True
        return False

    def _publish(self, requests: Sequence[Request]) -> None:
        """Publish the blocks that these requests have computed, so that others can find them."""
        if self.reuse is not None:
            for request in requests:
                self.reuse.publish(request.kv, request.tokens)

    def _admit(self, request: Request, room: int) -> int:
        """Take the published blocks that a waiting request begins with, and reserve the rest for its first rows.

        Return the number of those rows: 0, with nothing taken, if there are not enough blocks.
        """
        reuse = self.reuse if request.reuses_prefix and not request.kv.blocks else None
        if reuse is not None:
            reuse.find(request.kv, request.tokens, self.wants_draft_kv(request))
        rows = min(request.num_uncomputed, room)
        if not self._reserve(request, rows):
            if reuse is not None:
                self.allocator.release(request.kv)
            return 0
        if reuse is not None:
            self.prefix_query_tokens += len(request.tokens)
            self.prefix_hit_tokens += request.kv.committed
        return rows

    @property
    def _in_flight(self) -> bool:
        """Whether a step is in flight. No request in it can be preempted, so the scheduler waits for its completion."""
        return bool(self.finished_in_flight) or any(request.pending for request in self.running)

    def _reserve(self, request: Request, rows: int) -> bool:
        return self.reserve(request, request.num_scheduled_tokens + rows + self.num_draft_tokens)

    def _take_from_others(self, request: Request, rows: int) -> bool:
        """Make room for the rows: drop the drafts, then blocks of waiting samples, then preempt the newest requests.

        False: the request itself was preempted.
        """
        while not self._reserve(request, rows):
            if self.allocator.reserve(request.kv, request.kv.committed + rows - len(request.drafts)):
                request.drafts = []
                return True
            if self._drop_waiting_blocks():
                continue
            newest = self.running[-1]
            self._preempt(newest)
            if newest is request:
                return False
        return True

    def _drop_waiting_blocks(self) -> bool:
        """Release the blocks that a waiting sample shares of its prompt. False: no waiting sample holds any."""
        for request in reversed(self.waiting):
            if request.kv.blocks:
                self.allocator.release(request.kv)
                return True
        return False

    def _preempt(self, request: Request) -> None:
        """Free the request's blocks and queue it again.

        It keeps its tokens; blocks evicted meanwhile are recomputed.
        """
        self._publish([request])
        self.allocator.release(request.kv)
        request.drafts = []
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1


_SPARE_BLOCKS = 3  # blocks that a request reserves in addition to those that it needs now, while ...
_PLENTY = 8  # ... more than this number of blocks are free for each request that may run
