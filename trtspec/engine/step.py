"""The loop. Everything else serves these two functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from trtspec.core import StepInputs, StepOutputs
from trtspec.engine.batch import BatchAssembler
from trtspec.engine.faults import launch_isolated
from trtspec.engine.hidden_states import HiddenStateCollector
from trtspec.engine.propose import Proposer
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch, Scheduled, Scheduler
from trtspec.engine.steady import SteadyBatch
from trtspec.errors import EngineError
from trtspec.kv import rewind
from trtspec.outputs import Logprob
from trtspec.protocols import Executable
from trtspec.verify.strict import accept


class Emission(NamedTuple):
    """What one step gave one request. The first `num_drafts` of `tokens` were accepted drafts."""

    request: Request
    tokens: list[int]
    text: str  # what may be shown now; text that might become a stop string or half a character is held back
    num_drafts: int
    draft_len: int
    is_context: bool  # the first token(s) after reading in a prompt, or none yet
    finished: bool = False
    drafts: Sequence[int] = ()  # those that were verified
    logprobs: list[dict[int, Logprob]] | None = None  # of `tokens`, one each, where asked for
    num_past_end: int = 0  # drafts that were accepted too, past the token that ends the request


@dataclass
class StepLoop:
    """The parts of the loop. All state is in the scheduler, the requests and the cache, and in `steady`, if there is a
    batch that goes on as it is: then its requests lag behind, until settle()."""

    scheduler: Scheduler
    assemble: BatchAssembler
    target: Executable
    proposer: Proposer
    vocab_size: int
    collector: HiddenStateCollector | None = None  # wants the hidden states that the launch hands out
    steady: SteadyBatch | None = field(default=None, init=False)

    def step(self) -> list[Emission]:
        """One round for every request that can run: verify and draw, commit, finish, draft."""
        emissions = None if self.steady is None else self.go_on(self.steady)
        if emissions is None:
            self.settle()
            batch = self.scheduler.schedule()  # which requests, how many rows each; KV reserved
            done, failed = launch_isolated(batch, self.launch) if batch else ([], [])
            emissions = [self.fail(request, error) for request, error in failed] + self.conclude(done)
        return emissions

    @property
    def has_work(self) -> bool:
        """False: no request is there, and nothing is in flight."""
        return self.scheduler.has_work

    def launch(self, batch: Batch) -> StepOutputs:
        """One launch of the target: K+1 rows per generating request verified at once. Commits nothing."""
        wanted = self.proposer.wanted(batch, self.scheduler)
        return self.verify(self.assemble(batch, wanted))

    def verify(self, inputs: StepInputs) -> StepOutputs:
        """Run the target; a one-engine step has accepted already."""
        outputs = self.target.run(inputs)
        return outputs if outputs.verdict is not None else replace(outputs, verdict=accept(outputs, inputs.spec))

    def conclude(self, done: list[tuple[Batch, StepOutputs]]) -> list[Emission]:
        """Every request gets what its launch gave it, and drafts for the next step if it goes on."""
        emissions = []
        for batch, outputs in done:
            for reader in (self.collector, self.proposer.states):
                if reader is not None:
                    assert outputs.hidden_states is not None
                    reader.collect(batch, outputs.hidden_states)
            emissions += self.deliver(batch, outputs)
        self.proposer.propose([e.request for e in emissions if e.tokens and not e.finished], self.scheduler)
        self.proposer.read_in([e.request for e in emissions if not e.tokens and not e.finished])
        if len(done) == 1 and self.collector is None and self.proposer.states is None:
            self.steady = SteadyBatch.after(*done[0], self.scheduler, self.proposer)
            if self.steady is not None:
                self.assemble.look_again()
        return emissions

    def deliver(self, batch: Batch, outputs: StepOutputs) -> list[Emission]:
        """To those requests of the batch that have not ended meanwhile."""
        assert outputs.verdict is not None
        tokens, counts = outputs.verdict.tokens.tolist(), outputs.verdict.num_tokens.tolist()
        made = [None] * len(batch) if outputs.proposal is None else outputs.proposal.draft_tokens.tolist()
        logits = _logits_of(batch, outputs)
        return [
            self.update(row, drawn[:count], drafts, behind)
            for row, drawn, count, drafts, behind in zip(batch, tokens, counts, made, logits, strict=True)
            if row.request.finish_reason is None
        ]

    def go_on(self, steady: SteadyBatch) -> list[Emission] | None:
        """A step of a steady batch. None, and nothing done, if its requests are to be looked at first, or if its launch
        fails: who is to blame shows when it is launched as others are."""
        if not steady.can_go_on(self.scheduler, self.assemble):
            return None
        try:
            outputs = self.verify(self.assemble.go_on(*steady.rows()))
        except Exception:
            return None
        read = steady.read  # [B, K+1] what this step has verified
        given = steady.take(outputs, self.vocab_size)
        if given is None:  # there is a token that may end a request
            self.settle()
            return self.conclude([(steady.batch, outputs)])
        emissions = [
            Emission(request, tokens, "", len(tokens) - 1, steady.draft_len, False, drafts=known[1:])
            for request, tokens, known in zip(steady.requests, given, read, strict=True)
        ]
        for b in steady.texts:  # is made at once; it may end its request
            drafts = None if outputs.proposal is None else outputs.proposal.draft_tokens[b].tolist()
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

    def update(
        self, row: Scheduled, tokens: list[int], made: list[int] | None, logits: Tensor | None = None
    ) -> Emission:
        """Commit one request's verdict: keep the accepted rows, rewind the rest, append the tokens. `made`: the drafts
        that draft layers in the launch have made behind them, if there are such layers. logits [n, V] fp32 behind the
        tokens, where the request wants to know of them."""
        request, num_rows, draft_len, is_context = row
        offered = request.drafts[:draft_len]
        likely: list[dict[int, Logprob]] = []
        rewind.commit(request.kv, num_rows, len(tokens), draft_len, made is not None)
        request.drafts = made if made and tokens else []
        known, text = len(request.tokens), request.text
        shown = 0 if text is None else len(text.text)
        # where there was nothing to draw from, the id is past the vocabulary's end
        real = tokens
        if tokens and max(tokens) >= self.vocab_size:
            real = list(itertools.takewhile(lambda token: token < self.vocab_size, tokens))
        try:
            if request.logprobs is not None and logits is not None:
                likely = request.logprobs.read(logits, real)
            request.append(real)  # stop strings and detokenizer: host code that may raise
            if real is not tokens and not request.finished:
                raise EngineError(
                    f"request {request.request_id}: no token can be drawn: NaN logits (check the model's "
                    "weights and dtype), or every token is banned"
                )
            if request.guide is not None and not request.finished:
                request.guide.accept(real)
        except Exception as error:
            request.fail(error)
        taken = request.tokens[known:]
        if request.logprobs is not None:
            request.logprobs.entries += likely[: len(taken)]
        if tokens and is_context:
            self.scheduler.release_siblings(request)
        elif tokens:
            request.stats.observe(len(tokens), draft_len)
        if request.finish_reason is not None:
            self.remove(request)
        num_kept = max(len(tokens) - 1, 0)
        num_drafts = min(num_kept, len(taken))
        news, finished = "" if text is None else text.text[shown:], request.finish_reason is not None
        shown_logprobs = None if request.logprobs is None else likely[: len(taken)]
        return Emission(
            request, taken, news, num_drafts, draft_len, is_context, finished, offered, shown_logprobs,
            num_kept - num_drafts,
        )  # fmt: skip

    def fail(self, request: Request, error: Exception) -> Emission:
        """End a request that cannot be launched."""
        context = request.is_context
        request.fail(error)
        self.remove(request)
        return Emission(request, [], "", 0, 0, context, finished=True)

    def remove(self, request: Request) -> None:
        """The request has ended: its blocks are free, its drafter forgets it."""
        if self.collector is not None:
            self.collector.ended(request)
        self.scheduler.remove(request)
        self.proposer.forget(request)


def _logits_of(batch: Batch, outputs: StepOutputs) -> list[Tensor | None]:
    """[n, V] behind the tokens of each request that wants to know of them: of a context n = 1, else K + 1."""
    if not any(row.request.logprobs is not None for row in batch):
        return [None] * len(batch)
    assert outputs.verdict is not None
    assert outputs.logits is not None
    ends = list(itertools.accumulate(1 if row.is_context else outputs.verdict.tokens.shape[1] for row in batch))
    parts = zip(batch, [0, *ends], ends, strict=False)
    return [outputs.logits[start:end] if row.request.logprobs is not None else None for row, start, end in parts]
