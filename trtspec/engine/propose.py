"""Asking the drafter, on terms that keep the engine safe: how long, for whom, and what if it fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from trtspec.config.resolved import ResolvedSpeculation, draft_len_for_batch
from trtspec.core import Drafter, DraftRequest, Proposal
from trtspec.engine.request import Request
from trtspec.engine.row_states import RowStates
from trtspec.engine.scheduler import Scheduler
from trtspec.errors import EngineError

logger = logging.getLogger(__name__)


class Proposer:
    """Hands out drafts for the next step: those the launch made, or the drafter's. Without either: plain decoding."""

    def __init__(
        self,
        drafter: Drafter | None,
        speculation: ResolvedSpeculation | None,
        vocab_size: int,
        states: RowStates | None = None,
    ) -> None:
        self.drafter = drafter
        self.speculation = speculation
        self.vocab_size = vocab_size
        self.states = states  # of rows that the drafter is yet to read, if it reads any
        self.num_failures = 0
        self.num_stale = 0  # drafts dropped because draft KV has a gap: the hidden states for it are gone

    def draft_len(self, scheduler: Scheduler) -> int:
        """K of the next step, as the number of running requests has it."""
        return 0 if self.speculation is None else draft_len_for_batch(self.speculation, len(scheduler.running))

    def longest(self, scheduler: Scheduler) -> int:
        """Tokens that a request may have and still be given drafts: the draft model's context ends somewhere."""
        assert self.speculation is not None
        return self.speculation.max_model_len - self.draft_len(scheduler)

    def propose(self, requests: Sequence[Request], scheduler: Scheduler) -> None:
        """Fill `drafts` of the requests that may speculate in the next step; those the launch made are there already,
        and are cut to what may be used."""
        if self.speculation is None or not requests:
            return
        lengths = self._draft_lens(requests, scheduler)
        if self.drafter is not None:
            self._ask([(request, length) for request, length in zip(requests, lengths, strict=True) if length > 0])
            return
        for request, length in zip(requests, lengths, strict=True):
            if length > 0 and request.kv.draft_len < request.kv.committed:
                self.num_stale += 1
                request.drafts = []
            elif length < len(request.drafts):
                request.drafts = request.drafts[: max(length, 0)]

    def read_in(self, requests: Sequence[Request]) -> None:
        """Draft KV for the rows of prompts that go on in the next step, so that their states need not be kept."""
        if self.states is not None:
            self._ask([(request, 0) for request in requests])

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self.states is not None:
            self.states.forget(request)
        if self.drafter is not None:
            try:
                self.drafter.forget(request.request_id)
            except Exception as error:
                self._report(error)

    def _draft_lens(self, requests: Sequence[Request], scheduler: Scheduler) -> list[int]:
        """Drafts each can use: within the draft's context, the request's own end, and its reserved blocks."""
        K, block_size = self.draft_len(scheduler), scheduler.allocator.block_size
        longest = self.longest(scheduler)
        lengths = []
        for request in requests:
            length = len(request.tokens)
            if request.speculates and length <= longest:
                reserved = len(request.kv.blocks) * block_size
                lengths.append(min(K, request.length_limit - length - 1, reserved - length + 1))
            else:
                lengths.append(0)
        return lengths

    def _ask(self, asked: list[tuple[Request, int]]) -> None:
        """One call for all; if it fails, one call each, and who fails again goes on without speculation."""
        if self.states is not None:
            asked = [(request, length) for request, length in asked if self._can_be_read(request)]
        if not asked:
            return
        assert self.drafter is not None
        questions = [_question(request, length, self._unread(request)) for request, length in asked]
        try:
            proposal = self.drafter.propose(questions)
            answers = self._checked(proposal, questions)
        except Exception as error:
            self._report(error)
            if len(asked) > 1:
                for one in asked:
                    self._ask([one])
            else:
                asked[0][0].speculates = False
            return
        for (request, _), (drafts, kv_len) in zip(asked, answers, strict=True):
            request.drafts = drafts
            request.kv.draft_len = kv_len
            if self.states is not None:
                self.states.drop(request, kv_len)

    def _unread(self, request: Request) -> Tensor | None:
        """The states of rows that are committed and not in draft KV; None if the drafter reads no states, or one is
        gone."""
        if self.states is None:
            return None
        return self.states.rows(request, request.kv.draft_len, min(request.kv.committed, len(request.tokens) - 1))

    def _can_be_read(self, request: Request) -> bool:
        """False: speculation has ended for the request, or states are gone: until its prompt is read in again."""
        assert self.states is not None
        if not request.speculates:
            self.states.forget(request)
            return False
        if self._unread(request) is None:
            self.num_stale += 1
            return False
        return True

    def _checked(self, proposal: Proposal, questions: Sequence[DraftRequest]) -> list[tuple[list[int], int]]:
        """Drafts and valid draft KV of each request, or EngineError saying what is wrong with the proposal."""
        tokens, lengths = proposal.draft_tokens.tolist(), proposal.draft_lens.tolist()
        kv_lens = [question.draft_kv_len for question in questions]
        if proposal.draft_kv_lens is not None:
            kv_lens = proposal.draft_kv_lens.tolist()
        if not len(tokens) == len(lengths) == len(kv_lens) == len(questions):
            raise EngineError(
                f"the drafter answered {len(tokens)} rows, {len(lengths)} lengths and {len(kv_lens)} KV lengths to "
                f"{len(questions)} requests"
            )
        answers = []
        for row, length, kv_len, question in zip(tokens, lengths, kv_lens, questions, strict=True):
            if not 0 <= length <= min(question.max_draft_len, len(row)):
                raise EngineError(f"the drafter gave draft_len {length}; allowed are 0..{question.max_draft_len}")
            drafts = row[:length]
            if any(not isinstance(token, int) or not 0 <= token < self.vocab_size for token in drafts):
                raise EngineError(f"the drafter proposed {drafts}; token ids are integers 0..{self.vocab_size - 1}")
            most = len(question.tokens) + length
            if not isinstance(kv_len, int) or not 0 <= kv_len <= most:
                raise EngineError(f"the drafter gave draft_kv_len {kv_len!r}; allowed are 0..{most}")
            answers.append((drafts, kv_len))
        return answers

    def _report(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            logger.warning(
                "the drafter failed (%s: %s); such requests go on without drafts", type(error).__name__, error
            )


def _question(request: Request, length: int, states: Tensor | None) -> DraftRequest:
    return DraftRequest(
        request_id=request.request_id,
        tokens=request.tokens,
        max_draft_len=length,
        sampling=request.sampling,
        block_table=request.kv.blocks,
        draft_kv_len=request.kv.draft_len,
        hidden_states=states,
        prompt_len=request.prompt_len,
    )
