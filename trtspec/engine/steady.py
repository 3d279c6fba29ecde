"""The fast path: steps that do not read the requests, as long as the same requests generate with the same K.

A step reads some thirty fields of each request, and a launch evicts all of them from the CPU caches. With many requests
most of the host's time is spent fetching them. A step needs none of them if no request arrives, finishes or waits for
blocks: its input tokens are outputs of the last launch, and the lengths are sums. A SteadyBatch keeps just these. It
updates the tokens, KV lengths and counts of its requests every MAX_STEPS steps, and when it ends. Requests with a text
stream are read and updated in each step.

The lists here are not arrays on purpose: code is evicted like data, and the first array operation after a launch takes
longer than a loop over a short list.

`SteadyLoop` takes such steps where it can, and those of engine.step otherwise.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from operator import add, gt

from torch import Tensor

from trtspec.config.tree import Tree, depth_of
from trtspec.core import StepOutputs
from trtspec.engine.batch import InputBuilder
from trtspec.engine.faults import IsolatedLoop
from trtspec.engine.propose import Proposer
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch, Scheduler
from trtspec.engine.step import Emission, along_paths, scores_of
from trtspec.errors import DeviceError
from trtspec.kv import rewind

MAX_STEPS = 32
"""Steps between two updates of the requests. An update takes time in proportion to the steps it covers."""


class SteadyBatch:
    """B generations with K drafts each, and their tokens since the requests were last updated.

    The drafts are chains, or trees of K nodes that all have one shape. `batch` and `outputs` are those of a completed
    step whose requests are up to date.
    """

    def __init__(
        self, batch: Batch, outputs: StepOutputs, scheduler: Scheduler, proposer: Proposer, tree: Tree | None
    ) -> None:
        K = batch[0].draft_len
        self.batch = batch
        self.draft_len = K
        self.parents = None if tree is None else tree.parents_for(())[:K]  # of each request's drafts; None: a chain
        self.depth = depth_of(self.parents)
        self.requests = [row.request for row in batch]
        self.texts = [b for b, request in enumerate(self.requests) if request.text is not None]  # updated in every step
        self.stops = frozenset().union(*[request.eos_ids | request.stop_token_ids for request in self.requests])
        # [B, K+1] inputs of the next step: the last token and the drafts, -1 = no draft
        self.next_inputs: list[list[int]] = _next_inputs(outputs).tolist()
        self.scores = scores_of(outputs)  # [B][K] of these drafts; () = not known
        self.seq_lens = [len(request.tokens) for request in self.requests]
        # In a step that begins with more tokens a request may finish, or have fewer drafts because it finishes in the
        # next one, or exceed the draft model's context. A tree is less deep than K, so for it this is cautious.
        longest = proposer.longest(scheduler) if K > 0 else sys.maxsize
        self._max_lens = [min(request.length_limit - K - 2, longest) for request in self.requests]
        self._ahead = K + scheduler.num_draft_tokens  # KV rows of a step's drafts, and of drafting after it
        block_size = scheduler.allocator.block_size
        self._reserved_lens = [len(request.kv.blocks) * block_size - self._ahead for request in self.requests]
        self._drafts_inside = outputs.proposal is not None
        self._recorded: list[list[list[int]]] = []  # tokens by step and request

    @classmethod
    def after(
        cls, batch: Batch, outputs: StepOutputs, scheduler: Scheduler, proposer: Proposer, tree: Tree | None = None
    ) -> SteadyBatch | None:
        """A steady batch of the step that has just completed, if the next step has the same requests and shapes.

        tree: the shape of the drafts; None: a chain.
        """
        assert outputs.verdict is not None
        K = batch[0].draft_len
        if tree is not None and K and (tree.is_dynamic or outputs.proposal is None):
            return None  # each request has a shape of its own, or the drafts are not among the outputs
        same_shapes = outputs.verdict.tokens.shape[1] == K + 1 == _next_inputs(outputs).shape[1]
        all_run = len(batch) == len(scheduler.running) and not batch[0].is_context  # contexts come first
        if not all_run or not same_shapes or proposer.asks([row.request for row in batch], scheduler):
            return None
        for request, _, draft_len, _ in batch:
            if draft_len != K or len(request.drafts) != K or request.finish_reason is not None or request.needs_host:
                return None
        return cls(batch, outputs, scheduler, proposer, tree)

    def can_repeat(self, scheduler: Scheduler, input_builder: InputBuilder, proposer: Proposer) -> bool:
        """Whether the next step has the same shapes and requests; reserves its blocks.

        That is: every request has K drafts and enough blocks, none reaches its length limit, none can be admitted, and
        K drafts are to be used again.
        """
        if self.draft_len and min([tokens[-1] for tokens in self.next_inputs]) < 0:
            return False
        if scheduler.waiting and len(scheduler.running) < scheduler.max_batch_size:
            return False
        if any(map(gt, self.seq_lens, self._max_lens)):
            return False
        if any(map(gt, self.seq_lens, self._reserved_lens)):
            for b, seq_len in enumerate(self.seq_lens):
                if seq_len > self._reserved_lens[b]:
                    blocks, wanted = self.requests[b].kv.blocks, seq_len + self._ahead
                    start = len(blocks)
                    if not scheduler.reserve(self.requests[b], wanted):
                        return False
                    input_builder.add_blocks(b, start, blocks[start:])
                    capacity = len(blocks) * scheduler.allocator.block_size
                    # less than wanted: the request's length limit is covered
                    self._reserved_lens[b] = capacity - self._ahead if capacity >= wanted else sys.maxsize
        return proposer.repeats(self.requests, self.draft_len, scheduler, self.scores)

    def rows(self) -> tuple[list[int], list[int]]:
        """Input tokens [B * (K+1)] of the next step, and the length [B] of each sequence including them."""
        return list(chain.from_iterable(self.next_inputs)), [seq_len + self.draft_len for seq_len in self.seq_lens]

    def record(self, outputs: StepOutputs, vocab_size: int) -> list[list[int]] | None:
        """Record the outputs of a launch and return the tokens of each request.

        None, and nothing is recorded, if a request may finish: a stop token was drawn, or an id past the vocabulary.
        """
        assert outputs.verdict is not None
        drawn = outputs.verdict.tokens.tolist()  # -1 past a request's tokens
        emitted = [tokens if tokens[-1] >= 0 else tokens[: tokens.index(-1)] for tokens in drawn]
        flat = list(chain.from_iterable(emitted))
        if max(flat) >= vocab_size or not self.stops.isdisjoint(flat):
            return None
        if len(self._recorded) == MAX_STEPS:
            self.update_requests()
        self._recorded.append(emitted)
        self.seq_lens = list(map(add, self.seq_lens, map(len, emitted)))
        self.next_inputs, self.scores = _next_inputs(outputs).tolist(), scores_of(outputs)
        return emitted

    def drafts(self, b: int) -> list[int]:
        """The drafts that the next step verifies for request b."""
        drafts = self.next_inputs[b][1:]
        return drafts[: drafts.index(-1)] if -1 in drafts else drafts

    def update_requests(self) -> None:
        """Apply the recorded steps to the requests: tokens, KV lengths, counts, and the drafts of the last step."""
        if not self._recorded:
            return
        for b, (request, steps) in enumerate(zip(self.requests, zip(*self._recorded, strict=True), strict=True)):
            request.draft_scores = self.scores[b] if self.scores else ()
            if request.text is not None:
                continue
            old_len = len(request.tokens)
            request.tokens += chain.from_iterable(steps)
            rewind.commit(request.kv, 1, len(request.tokens) - old_len, 0, self._drafts_inside)  # as if in one step
            request.drafts = self.drafts(b)
            for count, times in Counter(map(len, steps)).items():
                request.stats.observe(count, self.draft_len, times, self.depth)
        self._recorded.clear()


@dataclass
class SteadyLoop(IsolatedLoop):
    """The loop, with the fast path.

    steady: the batch on the fast path, None = none. Its requests are out of date until settle().
    """

    steady: SteadyBatch | None = field(default=None, init=False)
    _launched: tuple[Batch, StepOutputs] | None = field(default=None, init=False)  # the last launch of this step

    def step(self) -> list[Emission]:
        """Run one step of every request that can run."""
        began = time.perf_counter()
        emissions = None if self.steady is None else self.repeat(self.steady)
        if emissions is None:
            self.settle()
            emissions = super().step()
            self.begin(self._launched)
        self.note_time(emissions, time.perf_counter() - began)
        return emissions

    def launch(self, batch: Batch) -> StepOutputs:
        """Launch the target as IsolatedLoop does, and remember the batch and its outputs."""
        self._launched = None
        outputs = super().launch(batch)
        self._launched = batch, outputs
        return outputs

    def begin(self, launched: tuple[Batch, StepOutputs] | None) -> None:
        """Enter the fast path after a completed step, if its batch allows it and no code reads its hidden states."""
        self._launched = None
        if launched is not None and self.collector is None and self.proposer.states is None:
            self.steady = SteadyBatch.after(*launched, self.scheduler, self.proposer, self.input_builder.tree)
            if self.steady is not None:
                self.input_builder.invalidate_tables()

    def repeat(self, steady: SteadyBatch) -> list[Emission] | None:
        """Run one step of a steady batch.

        None means that the ordinary step must run: the next step differs, or the launch failed. Blocks may be reserved
        then. DeviceError if the device is lost.
        """
        if not steady.can_repeat(self.scheduler, self.input_builder, self.proposer):
            return None
        try:
            outputs = self.verify(self.input_builder.repeat_batch(*steady.rows()))
        except DeviceError:
            raise  # the device is lost
        except Exception:
            return None
        inputs = steady.next_inputs  # [B, K+1] of this step
        emitted = steady.record(outputs, self.vocab_size)
        if emitted is None:  # a request may finish
            self._leave()
            emissions = self.deliver(steady.batch, outputs)
            self.propose(emissions)
            self.begin((steady.batch, outputs))
            return emissions
        emissions = [
            Emission(
                request,
                tokens,
                "",
                len(tokens) - 1,
                steady.draft_len,
                False,
                drafts=row[1:],
                draft_parents=steady.parents,
            )
            for request, tokens, row in zip(steady.requests, emitted, inputs, strict=True)
        ]
        self.observe(emissions)
        for b in steady.texts:  # detokenized in every step: a stop string may end the request
            drafts = None if outputs.proposal is None else steady.drafts(b)
            emissions[b] = self.update(steady.batch[b], emitted[b], drafts)
        if any(emissions[b].finished for b in steady.texts):
            self.settle()
        assert outputs.verdict is not None
        path = outputs.verdict.path
        return emissions if path is None else along_paths(emissions, steady.batch, path)

    def settle(self) -> None:
        """Leave the fast path between two steps: the requests get the drafts of the next one."""
        self.proposer.propose([one for one in self._leave() if one.finish_reason is None], self.scheduler)

    def _leave(self) -> list[Request]:
        """Leave the fast path, and update the requests of the steady batch, which are returned."""
        steady, self.steady = self.steady, None
        if steady is None:
            return []
        steady.update_requests()
        return steady.requests


def _next_inputs(outputs: StepOutputs) -> Tensor:
    """Inputs of the next step, [B, K+1]: last tokens and drafts."""
    assert outputs.verdict is not None
    return outputs.verdict.tokens if outputs.next_new_tokens is None else outputs.next_new_tokens
