"""The loop. Everything else serves these two functions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

from trtspec.core import Executable, StepOutputs
from trtspec.engine.batch import BatchAssembler
from trtspec.engine.faults import launch_isolated
from trtspec.engine.hidden_states import HiddenStateCollector
from trtspec.engine.propose import Proposer
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch, Scheduled, Scheduler
from trtspec.errors import EngineError
from trtspec.kv import rewind
from trtspec.verify.strict import accept


class Emission(NamedTuple):
    """What one step gave one request. The first `num_drafts` of `tokens` were accepted drafts."""

    request: Request
    tokens: list[int]
    text: str  # what may be shown now; text that might become a stop string or half a character is held back
    num_drafts: int
    draft_len: int
    is_context: bool  # the first token(s) after reading in a prompt, or none yet


@dataclass(frozen=True)
class StepLoop:
    """The parts of the loop; all state is in the scheduler, the requests and the cache."""

    scheduler: Scheduler
    assemble: BatchAssembler
    target: Executable
    proposer: Proposer
    vocab_size: int
    collector: HiddenStateCollector | None = None  # wants the hidden states that the launch hands out

    def step(self) -> list[Emission]:
        """One round for every request that can run: verify and draw, commit, finish, draft."""
        batch = self.scheduler.schedule()  # which requests, how many rows each; KV reserved
        done, failed = launch_isolated(batch, self.launch) if batch else ([], [])
        emissions = [self.fail(request, error) for request, error in failed]
        for part, outputs in done:
            assert outputs.verdict is not None
            if self.collector is not None:
                assert outputs.hidden_states is not None
                self.collector.collect(part, outputs.hidden_states)
            tokens, counts = outputs.verdict.tokens.tolist(), outputs.verdict.num_tokens.tolist()
            made = [None] * len(part) if outputs.proposal is None else outputs.proposal.draft_tokens.tolist()
            for row, drawn, count, drafts in zip(part, tokens, counts, made, strict=True):
                emissions.append(self.update(row, drawn[:count], drafts))

        # drafts only for those still running
        running = [e.request for e in emissions if e.tokens and e.request.finish_reason is None]
        self.proposer.propose(running, self.scheduler)
        return emissions

    def launch(self, batch: Batch) -> StepOutputs:
        """One launch of the target: K+1 rows per generating request verified at once. Commits nothing."""
        wanted = self.proposer.draft_len(self.scheduler) if any(row.emits for row in batch) else 0
        inputs = self.assemble(batch, wanted)
        outputs = self.target.run(inputs)
        return outputs if outputs.verdict is not None else replace(outputs, verdict=accept(outputs, inputs.spec))

    def update(self, row: Scheduled, tokens: list[int], made: list[int] | None) -> Emission:
        """Commit one request's verdict: keep the accepted rows, rewind the rest, append the tokens. `made`: the drafts
        that draft layers in the launch have made behind them, if there are such layers."""
        request, num_rows, draft_len, is_context = row
        rewind.commit(request.kv, num_rows, len(tokens), draft_len, made is not None)
        request.drafts = made if made and tokens else []
        known, text = len(request.tokens), request.text
        shown = 0 if text is None else len(text.text)
        # where there was nothing to draw from, the id is past the vocabulary's end
        real = tokens
        if tokens and max(tokens) >= self.vocab_size:
            real = list(itertools.takewhile(lambda token: token < self.vocab_size, tokens))
        try:
            request.append(real)  # stop strings and detokenizer: host code that may raise
            if real is not tokens and not request.finished:
                raise EngineError(
                    f"request {request.request_id}: no token can be drawn: NaN logits (check the model's "
                    "weights and dtype), or every token is banned"
                )
        except Exception as error:
            request.fail(error)
        taken = request.tokens[known:]
        if tokens and is_context:
            self.scheduler.release_siblings(request)
        elif tokens:
            request.stats.observe(len(tokens), draft_len)
        if request.finish_reason is not None:
            self.remove(request)
        num_drafts = min(len(tokens) - 1, len(taken)) if len(tokens) > 1 else 0
        return Emission(request, taken, "" if text is None else text.text[shown:], num_drafts, draft_len, is_context)

    def fail(self, request: Request, error: Exception) -> Emission:
        """End a request that cannot be launched."""
        context = request.is_context
        request.fail(error)
        self.remove(request)
        return Emission(request, [], "", 0, 0, context)

    def remove(self, request: Request) -> None:
        """The request has ended: its blocks are free, its drafter forgets it."""
        if self.collector is not None:
            self.collector.ended(request)
        self.scheduler.remove(request)
        self.proposer.forget(request.request_id)
