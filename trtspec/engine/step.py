"""The loop: StepLoop.step is one step of generation.

Three subclasses extend it: faults.py isolates the request at fault, steady.py repeats an unchanged batch cheaply, and
overlap.py keeps a step in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from trtspec.config.tree import depth_of
from trtspec.core import StepInputs, StepOutputs
from trtspec.engine.batch import InputBuilder
from trtspec.engine.constraints import parents_of
from trtspec.engine.guided_drafts import outcomes_of
from trtspec.engine.hidden_states import HiddenStateCollector
from trtspec.engine.propose import Proposer
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Batch, Scheduled, Scheduler
from trtspec.errors import EngineError
from trtspec.kv import rewind
from trtspec.outputs import Logprob
from trtspec.protocols import Executable
from trtspec.verify.strict import accept


class Emission(NamedTuple):
    """Result of one step for one request. The first `num_drafts` of `tokens` were accepted drafts."""

    request: Request
    tokens: list[int]
    text: str  # text to show now; half a character, or text that might become a stop string, is held back
    num_drafts: int
    draft_len: int
    is_context: bool  # a prefill step: `tokens` are the first after it, or none yet
    finished: bool = False
    drafts: Sequence[int] = ()  # the drafts that were verified, the accepted ones first
    logprobs: list[dict[int, Logprob]] | None = None  # one entry for each of `tokens`, if asked for
    num_past_end: int = 0  # drafts that were accepted after the token that ends the request
    draft_parents: Sequence[int] | None = None  # the draft before each draft, -1 = the last token; None = a chain

    @property
    def draft_depth(self) -> int | None:
        """How many tokens ahead the drafts are at most, if they are a tree; None = a chain."""
        return depth_of(self.draft_parents)


@dataclass
class StepLoop:
    """The loop and its parts. It keeps no state of its own between steps."""

    scheduler: Scheduler
    input_builder: InputBuilder
    target: Executable
    proposer: Proposer
    vocab_size: int
    collector: HiddenStateCollector | None = None  # collects the hidden states that the launch returns

    def step(self) -> list[Emission]:
        """Run one step of every request that can run: verify and draw, commit, finish, draft."""
        batch = self.scheduler.schedule()  # requests and their numbers of rows; reserves KV
        if not batch:
            return []
        outputs = self.launch(batch)  # build inputs, run, accept
        emissions = self.deliver(batch, outputs)  # commit, append, emit
        self.propose(emissions)
        return emissions

    def launch(self, batch: Batch) -> StepOutputs:
        """Launch the target once, which verifies the drafts of each generation. Commits nothing."""
        wanted = self.proposer.wanted(batch, self.scheduler)
        return self.verify(self.input_builder.build(batch, wanted))

    def verify(self, inputs: StepInputs) -> StepOutputs:
        """Run the target and accept drafts; a one-engine step has accepted them already."""
        outputs = self.target.run(inputs)
        return outputs if outputs.verdict is not None else replace(outputs, verdict=accept(outputs, inputs.spec))

    def deliver(self, batch: Batch, outputs: StepOutputs) -> list[Emission]:
        """Apply the outputs of a launch to the requests of its batch, except to those that have ended meanwhile."""
        assert outputs.verdict is not None
        if self.collector is not None:
            assert outputs.hidden_states is not None
            self.collector.collect(batch, outputs.hidden_states)
        if self.proposer.states is not None:
            assert outputs.hidden_states is not None
            self.proposer.states.collect(batch, outputs.hidden_states, outputs.verdict.path)
        tokens, counts = outputs.verdict.tokens.tolist(), outputs.verdict.num_tokens.tolist()
        made = _drafts_of(batch, outputs)
        logits = _logits_of(batch, outputs)
        emissions = [
            self.update(row, drawn[:count], drafts, row_logits)
            for row, drawn, count, drafts, row_logits in zip(batch, tokens, counts, made, logits, strict=True)
            if row.request.finish_reason is None
        ]
        if outputs.proposal is not None and outputs.proposal.draft_parents is not None:
            for row, parents in zip(batch, outputs.proposal.draft_parents.tolist(), strict=True):
                row.request.draft_parents = parents
        for row, scores in zip(batch, scores_of(outputs), strict=False):
            row.request.draft_scores = scores
        return emissions if outputs.verdict.path is None else along_paths(emissions, batch, outputs.verdict.path)

    def propose(self, emissions: Sequence[Emission]) -> None:
        """Make drafts for the next step, for the requests that go on."""
        self.observe(emissions)
        self.proposer.propose([e.request for e in emissions if e.tokens and not e.finished], self.scheduler)
        self.proposer.read_in([e.request for e in emissions if not e.tokens and not e.finished])
        self.release_samples(emissions)

    def release_samples(self, emissions: Sequence[Emission]) -> None:
        """Let further samples of prompts run whose prefill is complete. Call this once the prompts have draft KV."""
        for one in emissions:
            if one.is_context and one.tokens:
                self.scheduler.release_siblings(one.request)

    def observe(self, emissions: Sequence[Emission]) -> None:
        """Tell the chooser of draft lengths, if there is one, what a step accepted of the requests that go on."""
        if self.proposer.chooser is not None:
            going_on = [one for one in emissions if one.tokens and not one.is_context and not one.finished]
            found = [outcomes_of(e.request, e.draft_len, e.num_drafts + e.num_past_end) for e in going_on]
            self.proposer.chooser.observe(list(itertools.chain.from_iterable(found)))

    def note_time(self, emissions: Sequence[Emission], seconds: float) -> None:
        """Tell the chooser of draft lengths, if there is one, how long a step took.

        Steps with context rows, and steps in which a request ends, are left out. So are steps that verify lookups which
        a draft model did not make: the chooser would count its drafts as made.
        """
        chooser, proposer = self.proposer.chooser, self.proposer
        if chooser is None or not emissions or any(one.is_context or one.finished for one in emissions):
            return
        verified = [one.draft_len for one in emissions]
        if proposer.lookups is None or proposer.drafts_inside or max(verified) <= chooser.made:
            chooser.time(verified, seconds)

    @property
    def has_work(self) -> bool:
        """False: there is no request, and no step is in flight."""
        return self.scheduler.has_work

    def settle(self) -> None:
        """Bring every request up to date with the steps so far."""

    # -- one request's part of a step ---------------------------------------------------------------------------------

    def update(
        self, row: Scheduled, tokens: list[int], made: list[int] | None, logits: Tensor | None = None
    ) -> Emission:
        """Apply the verdict `tokens` to one request.

        made: the drafts that draft layers in the launch made after the tokens; None = there are no such layers.
        logits: [n, V] fp32, from which the tokens were drawn, if the request wants log-probabilities.
        """
        request = row.request
        old_len, shown = len(request.tokens), len(request.shown_text)
        verified = self.commit(row, tokens, made)
        likely = self.append(request, tokens, logits)
        return self.emit(row, len(tokens), verified, request.tokens[old_len:], request.shown_text[shown:], likely)

    def commit(self, row: Scheduled, tokens: list[int], made: list[int] | None) -> list[int]:
        """Keep the KV of the accepted rows, rewind the rest, and store the drafts that were made.

        Return the drafts that were verified. They are fewer than their rows if the rows were laid out before the number
        of drafts was known.
        """
        request, num_rows, draft_len, _ = row
        verified = request.drafts[:draft_len]
        rewind.commit(request.kv, num_rows, len(tokens), draft_len, made is not None)
        request.drafts = made if made and tokens else []
        return verified

    def append(self, request: Request, tokens: list[int], logits: Tensor | None) -> list[dict[int, Logprob]]:
        """Append the tokens to the request, and return their log-probabilities if it wants them. logits: as in update.

        Stop strings, detokenizer and grammar are host code that may raise. The request then ends with the error.
        """
        likely: list[dict[int, Logprob]] = []
        # an id past the vocabulary: no token could be drawn
        real = tokens
        if tokens and max(tokens) >= self.vocab_size:
            real = list(itertools.takewhile(lambda token: token < self.vocab_size, tokens))
        try:
            if request.logprobs is not None and logits is not None:
                likely = request.logprobs.read(logits, real)
            request.append(real)
            if real is not tokens and not request.finished:
                raise EngineError(
                    f"request {request.request_id}: no token can be drawn: NaN logits (check the model's "
                    "weights and dtype), or every token is banned"
                )
            if request.guide is not None and not request.finished:
                request.guide.accept(real)
        except Exception as error:
            request.fail(error)
        return likely

    def emit(
        self,
        row: Scheduled,
        num_tokens: int,
        verified: Sequence[int],
        taken: list[int],
        news: str,
        likely: list[dict[int, Logprob]],
    ) -> Emission:
        """Count the step, and remove the request if the step was its last.

        num_tokens: number of tokens in the verdict. taken: the tokens of it up to the one that ended the request. news:
        the text of `taken` that is shown.
        """
        request, is_context, draft_len = row.request, row.is_context, len(verified)
        finished = request.finish_reason is not None
        tree = self.input_builder.tree
        parents = None if tree is None else parents_of(request, tree)[:draft_len]
        shown = None
        if request.logprobs is not None:
            shown = likely[: len(taken)]
            request.logprobs.entries += shown
        if num_tokens and not is_context:
            request.stats.observe(num_tokens, draft_len, depth=depth_of(parents))
        if finished:
            self.remove(request)
        num_kept = max(num_tokens - 1, 0)
        num_drafts = min(num_kept, len(taken))
        cut = num_kept - num_drafts
        return Emission(
            request, taken, news, num_drafts, draft_len, is_context, finished, verified, shown, cut, parents
        )

    @property
    def max_depth(self) -> int:
        """Largest number of tokens that any draft is ahead."""
        tree = self.input_builder.tree
        return self.input_builder.max_draft_len if tree is None else tree.depth

    def remove(self, request: Request) -> None:
        """Free the blocks of a request that has ended, and its state in the drafter."""
        if self.collector is not None:
            self.collector.ended(request)
        self.scheduler.remove(request)
        self.proposer.forget(request)


def along_paths(emissions: Sequence[Emission], batch: Batch, path: Tensor) -> list[Emission]:
    """The emissions with their drafts in another order: the nodes of the path, then those of other branches."""
    rows = {id(row.request): one for row, one in zip(batch, path.tolist(), strict=True)}
    ordered = []
    for emission in emissions:
        nodes = [row - 1 for row in rows[id(emission.request)] if row > 0]
        others = [node for node in range(len(emission.drafts)) if node not in nodes]
        order, parents = (*nodes, *others), emission.draft_parents or ()
        place = {-1: -1, **{node: i for i, node in enumerate(order)}}
        ordered.append(
            emission._replace(
                drafts=[emission.drafts[node] for node in order],
                draft_parents=[place[parents[node]] for node in order],
            )
        )
    return ordered


def scores_of(outputs: StepOutputs) -> Sequence[Sequence[float]]:
    """Scores of the drafts that a launch made, [B][K], 0 for NaN; () = it gives none."""
    if outputs.proposal is None or outputs.proposal.draft_scores is None:
        return ()
    scores: list[list[float]] = outputs.proposal.draft_scores.tolist()
    return [[score if score == score else 0.0 for score in row] for row in scores]


def _drafts_of(batch: Batch, outputs: StepOutputs) -> Sequence[list[int] | None]:
    """Drafts that draft layers in the launch made for each request; None where there are no such layers."""
    if outputs.proposal is None:
        return [None] * len(batch)
    made, lens = outputs.proposal.draft_tokens.tolist(), outputs.proposal.draft_lens.tolist()
    return [drafts[:count] for drafts, count in zip(made, lens, strict=True)]


def _logits_of(batch: Batch, outputs: StepOutputs) -> list[Tensor | None]:
    """Logits [draft_len + 1, V] of each request that wants log-probabilities."""
    if not any(row.request.logprobs is not None for row in batch):
        return [None] * len(batch)
    assert outputs.logits is not None
    assert outputs.verdict is not None
    ends = list(itertools.accumulate(row.draft_len + 1 for row in batch))
    parts: list[Tensor | None] = []
    for b, (row, start, end) in enumerate(zip(batch, [0, *ends], ends, strict=False)):
        own = outputs.logits[start:end]
        if row.request.logprobs is None:
            parts.append(None)
        else:
            parts.append(own if outputs.verdict.path is None else own[outputs.verdict.path[b].clamp(min=0)])
    return parts
