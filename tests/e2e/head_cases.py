"""Draft heads for whole-engine tests: watched from inside, and made to guess right as often as a test wants.

A random head is almost always wrong, so it does not test acceptance. And a guess made from wrong draft KV is still a
guess, so outputs do not show whether draft KV is right. Hence two things:

- Drafts can be taken from the known right continuation, with lies.
- Every hidden state that drafts were made from is logged. Tests compare the log bit for bit with the log of an engine
  without any optimisation.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tests.e2e.tiny import VOCAB, Case, Outcome, Run, assert_all_blocks_free, run_alone, run_together
from trtspec import LLM
from trtspec.backends.eager import EagerExecutable
from trtspec.core import AttnMetadata, Proposal, SamplingTensors, SpecMetadata
from trtspec.engine.stats import TimedExecutable
from trtspec.engine.step import Emission
from trtspec.methods.head_drafter import HeadDrafter
from trtspec.methods.step import HeadStep, OneEngineStep
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import PagedAttend

Place = tuple[int, int, int]
"""Request id, index of the first token its chain guesses, index of the token guessed."""
Made = tuple[bytes, int]
"""The bytes of the hidden state that a draft was made from, and the draft."""

ROOMY: dict[str, Any] = {"num_kv_blocks": 1000, "block_size": 4}
PLAIN: dict[str, Any] = {**ROOMY, "max_batch_size": 64, "enable_prefix_caching": False}
# Up to 84 tokens a request in 24 blocks of 4, so requests are preempted. At most 32 rows a step, so long prompts are
# prefilled in chunks.
TIGHT: dict[str, Any] = {"max_num_tokens": 32, "num_kv_blocks": 25, "block_size": 4}


class WatchedHead(SpecWorker):
    """A worker of any kind (`watch` makes it) that logs its drafts and the hidden states they were made from.

    With `answers` (prompt and output of each request) it drafts the right token, or, with probability `lie`, another
    one. Whether it lies depends on request and position alone. Either way its layers run, write KV, and read the drafts
    that it returned. Drafts made after a chunk of a prompt are not logged, because no request verifies them.

    cut: chains of requests that have fewer blocks than their masks have rows, because blocks run short or a request
    ends. Their drafts depend on the number of blocks.
    """

    def __init__(self, inner: SpecWorker, answers: Sequence[Sequence[int]] | None = None, lie: float = 0.3) -> None:
        super(torch.nn.Module, self).__init__()
        self.__dict__ |= inner.__dict__
        self.answers = answers
        self.lie = lie
        self.made: dict[Place, set[Made]] = {}
        self.cut: set[tuple[int, int]] = set()
        self._ids: tuple[int, ...] = ()
        self._emits: list[bool] = []
        self._cut: list[bool] = []
        self._starts: list[int] | None = None

    def draft(
        self,
        hidden: Tensor,
        counts: Tensor,
        kv_lens: Tensor,
        attn: AttnMetadata,
        spec: SpecMetadata,
        attend: PagedAttend,
    ) -> Proposal:
        self._ids, self._starts, self._emits = spec.request_ids, None, (counts > 0).tolist()
        self._cut = _hides_rows(attn)
        return super().draft(hidden, counts, kv_lens, attn, spec, attend)

    def sample_drafts(
        self, step: int, hidden: Tensor, sampling: SamplingTensors, probs: list[Tensor] | None = None
    ) -> Tensor:
        drafts, places = super().sample_drafts(step, hidden, sampling, probs), sampling.positions.tolist()
        each = len(places) // len(self._ids)  # drafts of a request that are made at once
        if self._starts is None:
            self._starts = places[::each]
            self.cut |= {
                (one, start) for one, start, cut in zip(self._ids, self._starts, self._cut, strict=True) if cut
            }
        rows = list(zip(self._ids, self._starts, self._emits, strict=True))
        keys = [(*rows[i // each][:2], place) for i, place in enumerate(places)]
        if self.answers is not None:
            drafts = torch.tensor([self._told(request, place) for request, _, place in keys])
        emits = [rows[i // each][2] for i in range(len(places))]
        for key, row, draft in itertools.compress(zip(keys, hidden, drafts.tolist(), strict=True), emits):
            self.made.setdefault(key, set()).add((row.float().numpy().tobytes(), draft))
        return drafts

    def _told(self, request: int, place: int) -> int:
        assert self.answers is not None
        rng, answer = random.Random(f"{request} {place}"), self.answers[request]
        right = answer[place] if place < len(answer) else rng.randrange(VOCAB)
        return (right + rng.randrange(1, VOCAB)) % VOCAB if rng.random() < self.lie else right


def step_of(llm: LLM) -> OneEngineStep | HeadStep:
    """The step with draft layers: that of the engine's target or of its drafter."""
    drafter = llm.engine.loop.proposer.drafter
    timed = drafter.head if isinstance(drafter, HeadDrafter) else llm.engine.loop.target
    assert isinstance(timed, TimedExecutable)
    assert isinstance(timed.inner, EagerExecutable)
    assert isinstance(timed.inner.step, OneEngineStep | HeadStep)
    return timed.inner.step


def watch(llm: LLM, answers: Sequence[Sequence[int]] | None = None, lie: float = 0.3) -> WatchedHead:
    """Replace the engine's worker by a watched head, and return the head."""
    step = step_of(llm)
    assert isinstance(step.worker, SpecWorker)
    kind: Any = type("Watched", (WatchedHead, type(step.worker)), {})
    step.worker = head = kind(step.worker, answers, lie)
    return cast(WatchedHead, head)


@dataclass
class Watch:
    """The drafts that an engine's requests were given to verify, and the requests whose draft KV was incomplete.

    It looks at draft KV after each step. Draft KV is complete if it covers all committed tokens, or if the engine kept
    the hidden states to compute the rest from. The engine keeps none while a prompt is being prefilled.
    """

    llm: LLM
    given: dict[Place, int] = field(default_factory=dict)
    incomplete: list[tuple[int, int, int]] = field(default_factory=list)  # request, its draft_len, committed

    def __call__(self, emissions: list[Emission]) -> None:
        self.llm.engine.settle()
        for request in self.llm.engine.loop.scheduler.running:
            kv, kept = request.kv, self.llm.engine.loop.proposer.states
            known = min(kv.committed, len(request.tokens) - 1)
            waits = (
                kept is not None and not request.is_context and kept.rows(request, kv.draft_kv_len, known) is not None
            )
            if kv.draft_kv_len != kv.committed and not waits:
                self.incomplete.append((request.request_id, request.kv.draft_kv_len, request.kv.committed))
            known = len(request.tokens)
            assert not request.drafts or known + len(request.drafts) < request.length_limit  # no draft past the limit
            for j, draft in enumerate(request.drafts):
                self.given[request.request_id, known, known + j] = draft


def run_watched(llm: LLM, cases: Sequence[Case], seed: int = 0) -> tuple[Run, Watch]:
    """Call run_together, and return its run and what Watch saw."""
    seen = Watch(llm)
    return run_together(llm.engine, cases, seed, seen), seen


def log_plainly(llm: LLM, head: WatchedHead, cases: Sequence[Case]) -> dict[Place, Made | None]:
    """The head's drafts after every token of every case, for an engine that has room for all cases.

    Each prompt is prefilled at once and no draft is ever used. So each row of draft KV is computed once, from known
    tokens. None stands for a chain that was cut.
    """
    requests = [request for case in cases for request in llm.engine.add_request(case.prompt, case.params)]
    for request in requests:
        request.speculates = False
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.engine.stats.preemptions == 0
    return {place: None if place[:2] in head.cut else one for place, made in head.made.items() for one in made}


@dataclass(frozen=True)
class Reference:
    """The right outcomes of `cases`, and the hidden states and drafts that go with them.

    log: whether the head knows the answers and lies, or drafts by itself -> its drafts, computed when first asked for.
    """

    cases: list[Case]
    outcomes: list[Outcome]  # those of each case alone, without speculation
    answers: list[list[int]]  # prompts and outputs
    log: Callable[[bool], dict[Place, Made | None]]

    def first(self, count: int) -> Reference:
        """The reference of the first `count` cases."""
        return replace(self, cases=self.cases[:count], outcomes=self.outcomes[:count])


_ALONE: dict[str, list[Outcome]] = {}
"""The outcomes of each case alone, by the target, the cases and the options of the engine."""


def refer(target: Path, plain: Callable[[], LLM], cases: list[Case], **options: Any) -> Reference:
    """Compute the reference of `cases`, with `options` for both engines. plain: makes an engine for log_plainly."""
    asked = repr((target, cases, options))
    if asked not in _ALONE:
        with LLM(target, enable_prefix_caching=False, **ROOMY, **options) as llm:
            _ALONE[asked] = run_alone(llm.engine, cases)
    outcomes = _ALONE[asked]
    answers = [case.prompt + outcome.token_ids for case, outcome in zip(cases, outcomes, strict=True)]

    @functools.cache
    def log(told: bool) -> dict[Place, Made | None]:
        with plain() as llm:
            return log_plainly(llm, watch(llm, answers if told else None), cases)

    return Reference(cases, outcomes, answers, log)


def assert_right(llm: LLM, expected: Reference, told: bool, cases: list[Case] | None = None) -> Run:
    """Check the cases, run together.

    It checks outputs, the hidden states of drafts, draft KV after each step, and that all blocks are free in the end.
    """
    head = watch(llm, expected.answers if told else None)
    run, seen = run_watched(llm, cases or expected.cases)
    assert run.outcomes == expected.outcomes
    assert first_wrong_draft(head, seen, expected.log(told)) is None
    assert not seen.incomplete
    assert llm.engine.stats.stale_drafts == 0
    assert_all_blocks_free(llm)
    return run


def first_wrong_draft(head: WatchedHead, seen: Watch, expected: Mapping[Place, Made | None]) -> str | None:
    """Describe the first draft given to a request that is wrong, or was made of wrong bits. None if there is none.

    Chains that were cut, here or in `expected`, are not compared.
    """
    compared = 0
    for place, draft in seen.given.items():
        right = expected[place]
        if right is None or place[:2] in head.cut:
            continue
        if head.made[place] != {right}:
            return f"{place}: {len(head.made[place])} different hidden states, {draft} for {right[1]}"
        if draft != right[1]:
            return f"{place}: {draft} handed on for {right[1]}"
        compared += 1
    assert compared > 0.6 * len(seen.given), (compared, len(seen.given))
    return None


def _hides_rows(attn: AttnMetadata) -> list[bool]:
    """For each request: whether its mask hides rows from each other because no block has room for them."""
    if attn.tree_mask is None or not attn.tree_mask.numel():
        return [False] * attn.batch_size
    everything = (1 << (attn.tree_mask.shape[0] // attn.batch_size)) - 1
    return (attn.tree_mask[attn.cu_q_lens[:-1].long(), 0] != everything).tolist()


# -- whole runs against a reference --------------------------------------------------------------------------------

MOST_K = 5

Make = Callable[..., LLM]
"""(K, fields of the speculation, engine options) -> LLM."""


def maker(target: Path, method: Mapping[str, Any]) -> Make:
    """Return a function that makes an LLM. method: fields of the speculation that stay the same."""

    def make(k: int, fields: Mapping[str, Any] | None = None, **options: Any) -> LLM:
        return LLM(target, {**method, "num_speculative_tokens": k, **(fields or {})}, **options)

    return make


def inside(make: Make, **options: Any) -> LLM:
    """Make an LLM with the head in the target's graph, for log_plainly."""
    return make(MOST_K, {"one_engine": True}, **PLAIN, **options)


def chunks_of(llm: LLM, rows: int) -> Callable[[], int]:
    """From now on, run exactly `rows` rows of prompts in each step if that many wait, and all generation rows.

    Returns a function. It returns the most rows that one request prefilled in one step.
    """
    scheduler: Any = llm.engine.loop.scheduler
    schedule = scheduler.schedule
    most = 0

    def chunked() -> Any:
        nonlocal most
        generating = sum(1 + len(r.drafts) for r in scheduler.running if not r.is_context)
        scheduler.max_num_tokens = rows + generating
        batch = schedule()
        most = max([most, *(row.num_rows for row in batch if row.is_context)])
        return batch

    scheduler.schedule = chunked
    return lambda: most
