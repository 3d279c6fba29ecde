"""Steps that do not look at the requests: while the same ones generate, with as many drafts each.

What a step wants to know of a request lies in thirty places of memory, and a launch leaves none of them in the CPU's
caches: with many requests, fetching them is most of what the host does. But a step after which nobody comes, ends or
waits for blocks needs nothing from them. The last launch gave the tokens to read in, and how many there are is a sum.
So that is all a SteadyBatch keeps. Its requests hear of their tokens, KV and counts once in a while and when it ends,
and are then as if every step had been theirs.

Code is fetched like data: the first array operation after a launch takes longer than a loop over short lists. Hence
the lists.

`SteadyLoop` is the loop that makes such steps where it can, and else those of engine.step.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from operator import add, gt

from torch import Tensor

from trtspec.core import StepOutputs
from trtspec.engine.batch import BatchAssembler
from trtspec.engine.faults import IsolatedLoop
from trtspec.engine.propose import Proposer
from trtspec.engine.scheduler import Batch, Scheduler
from trtspec.engine.step import Emission
from trtspec.errors import DeviceError
from trtspec.kv import rewind

MAX_STEPS = 32
"""Steps until the requests hear of them: what they are told then takes time, too."""


class SteadyBatch:
    """B generations with K drafts each, and what they were given since their requests last heard of it.

    `batch` and `outputs` are those of a step that is over, its requests up to date.
    """

    def __init__(self, batch: Batch, outputs: StepOutputs, scheduler: Scheduler, proposer: Proposer) -> None:
        K = batch[0].draft_len
        self.batch = batch
        self.draft_len = K
        self.requests = [row.request for row in batch]
        self.texts = [b for b, request in enumerate(self.requests) if request.text is not None]  # never lag behind
        self.stops = frozenset().union(*[request.eos_ids | request.stop_token_ids for request in self.requests])
        # [B, K+1] last token and drafts, -1 where there is none
        self.read: list[list[int]] = _read_next(outputs).tolist()
        self.known = [len(request.tokens) for request in self.requests]
        # A step that begins with more tokens may be a request's last, or the one before the last, which has fewer
        # drafts; and a draft model can only see so many.
        longest = proposer.longest(scheduler) if K > 0 else sys.maxsize
        self._most = [min(request.length_limit - K - 2, longest) for request in self.requests]
        self._ahead = K + scheduler.num_draft_tokens  # a step writes KV of its drafts, and drafting writes some more
        block_size = scheduler.allocator.block_size
        self._room = [len(request.kv.blocks) * block_size - self._ahead for request in self.requests]
        self._drafts_inside = outputs.proposal is not None
        self._given: list[list[list[int]]] = []  # by step and request

    @classmethod
    def after(cls, batch: Batch, outputs: StepOutputs, scheduler: Scheduler, proposer: Proposer) -> SteadyBatch | None:
        """The batch of the step that is just over, if the next step is to have the same requests and shapes."""
        assert outputs.verdict is not None
        K = batch[0].draft_len
        same_shapes = outputs.verdict.tokens.shape[1] == K + 1 == _read_next(outputs).shape[1]
        everybody = len(batch) == len(scheduler.running) and not batch[0].is_context  # contexts come first
        if proposer.drafter is not None or not everybody or not same_shapes:
            return None
        for request, _, draft_len, _ in batch:
            if draft_len != K or len(request.drafts) != K or request.finish_reason is not None or request.needs_host:
                return None
        return cls(batch, outputs, scheduler, proposer)

    def can_go_on(self, scheduler: Scheduler, assemble: BatchAssembler) -> bool:
        """Whether all have K drafts, nobody can come in the next step or end by its length, and all have blocks,
        reserved here."""
        if self.draft_len and min([tokens[-1] for tokens in self.read]) < 0:
            return False
        if scheduler.waiting and len(scheduler.running) < scheduler.max_batch_size:
            return False
        if any(map(gt, self.known, self._most)):
            return False
        if any(map(gt, self.known, self._room)):
            for b, known in enumerate(self.known):
                if known > self._room[b]:
                    blocks, wanted = self.requests[b].kv.blocks, known + self._ahead
                    start = len(blocks)
                    if not scheduler.reserve(self.requests[b], wanted):
                        return False
                    assemble.add_blocks(b, start, blocks[start:])
                    room = len(blocks) * scheduler.allocator.block_size
                    self._room[b] = room - self._ahead if room >= wanted else sys.maxsize  # all it can ever need
        return True

    def rows(self) -> tuple[list[int], list[int]]:
        """What the next step is to read in: tokens [B * (K+1)], and the length of each sequence with them."""
        return list(chain.from_iterable(self.read)), [known + self.draft_len for known in self.known]

    def take(self, outputs: StepOutputs, vocab_size: int) -> list[list[int]] | None:
        """Keep what a launch gave, and return each request's tokens. None, and nothing kept, if somebody may end with
        it: there is a stop token, or one that is none."""
        assert outputs.verdict is not None
        drawn = outputs.verdict.tokens.tolist()  # -1 past a request's tokens
        given = [tokens if tokens[-1] >= 0 else tokens[: tokens.index(-1)] for tokens in drawn]
        flat = list(chain.from_iterable(given))
        if max(flat) >= vocab_size or not self.stops.isdisjoint(flat):
            return None
        if len(self._given) == MAX_STEPS:
            self.tell()
        self._given.append(given)
        self.known = list(map(add, self.known, map(len, given)))
        self.read = _read_next(outputs).tolist()
        return given

    def drafts(self, b: int) -> list[int]:
        """What request b is to verify next."""
        drafts = self.read[b][1:]
        return drafts[: drafts.index(-1)] if -1 in drafts else drafts

    def tell(self) -> None:
        """The requests are as if every step had been theirs; their drafts are those of the last."""
        if not self._given:
            return
        for b, (request, steps) in enumerate(zip(self.requests, zip(*self._given, strict=True), strict=True)):
            if request.text is not None:
                continue
            known = len(request.tokens)
            request.tokens += chain.from_iterable(steps)
            rewind.commit(request.kv, 1, len(request.tokens) - known, 0, self._drafts_inside)  # as if of one step
            request.drafts = self.drafts(b)
            for count, times in Counter(map(len, steps)).items():
                request.stats.observe(count, self.draft_len, times)
        self._given.clear()


@dataclass
class SteadyLoop(IsolatedLoop):
    """The loop, which does not look at its requests while the same ones go on. `steady`: the batch that does, if there
    is one; its requests lag behind until settle()."""

    steady: SteadyBatch | None = field(default=None, init=False)
    _launched: tuple[Batch, StepOutputs] | None = field(default=None, init=False)  # the last launch of this step

    def step(self) -> list[Emission]:
        """One round for every request that can run."""
        emissions = None if self.steady is None else self.go_on(self.steady)
        if emissions is None:
            self.settle()
            emissions = super().step()
            self.begin(self._launched)
        return emissions

    def launch(self, batch: Batch) -> StepOutputs:
        """One launch of the target, as IsolatedLoop has it."""
        self._launched = None
        outputs = super().launch(batch)
        self._launched = batch, outputs
        return outputs

    def begin(self, launched: tuple[Batch, StepOutputs] | None) -> None:
        """A step is over: find out whether its batch goes on as it is, and nobody reads the states of its rows."""
        self._launched = None
        if launched is not None and self.collector is None and self.proposer.states is None:
            self.steady = SteadyBatch.after(*launched, self.scheduler, self.proposer)
            if self.steady is not None:
                self.assemble.look_again()

    def go_on(self, steady: SteadyBatch) -> list[Emission] | None:
        """A step of a steady batch. None, and nothing done, if its requests are to be looked at first, or if its launch
        fails: who is to blame shows when it is launched as others are."""
        if not steady.can_go_on(self.scheduler, self.assemble):
            return None
        try:
            outputs = self.verify(self.assemble.go_on(*steady.rows()))
        except DeviceError:
            raise  # there is nothing left to try on
        except Exception:
            return None
        read = steady.read  # [B, K+1] what this step has verified
        given = steady.take(outputs, self.vocab_size)
        if given is None:  # there is a token that may end a request
            self.settle()
            emissions = self.deliver(steady.batch, outputs)
            self.propose(emissions)
            self.begin((steady.batch, outputs))
            return emissions
        emissions = [
            Emission(request, tokens, "", len(tokens) - 1, steady.draft_len, False, drafts=known[1:])
            for request, tokens, known in zip(steady.requests, given, read, strict=True)
        ]
        for b in steady.texts:  # is made at once; it may end its request
            drafts = None if outputs.proposal is None else steady.drafts(b)
            emissions[b] = self.update(steady.batch[b], given[b], drafts)
        if any(emissions[b].finished for b in steady.texts):
            self.settle()
        return emissions

    def settle(self) -> None:
        """Bring the requests of a steady batch up to date; the next step looks at every one of them."""
        steady, self.steady = self.steady, None
        if steady is not None:
            steady.tell()
            running = [request for request in steady.requests if request.finish_reason is None]
            self.proposer.propose(running, self.scheduler)


def _read_next(outputs: StepOutputs) -> Tensor:
    """[B, K+1] what the next step is to read in: last tokens and drafts."""
    assert outputs.verdict is not None
    return outputs.verdict.tokens if outputs.next_new_tokens is None else outputs.next_new_tokens
