"""Calls the drafter safely: limits the drafts of each request, checks the proposal, and isolates failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor

from trtspec.config.speculation_plan import SpeculationPlan, draft_len_for_batch
from trtspec.config.tree import node_depths
from trtspec.engine.draft_chances import Offer
from trtspec.engine.draft_length import DraftLength
from trtspec.engine.guided_drafts import draft_source, follow_grammar
from trtspec.engine.proposal_checks import checked_proposal
from trtspec.engine.questions import ShownTokens, question_to_drafter
from trtspec.engine.request import Request
from trtspec.engine.row_states import RowStates
from trtspec.engine.scheduler import Batch, Scheduler
from trtspec.errors import DeviceError
from trtspec.protocols import Drafter, LearningDrafter, Lookups

logger = logging.getLogger(__name__)

READ_ROWS = 64
"""Number of rows of a request that has no drafts at present whose states wait until draft layers read them."""


class Proposer:
    """A source of drafts for the next step, made by the launch, by the drafter, or by lookups next to either.

    Without any of them: plain decoding.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        speculation: SpeculationPlan | None,
        vocab_size: int,
        states: RowStates | None = None,
    ) -> None:
        self.drafter = drafter
        self.speculation = speculation
        self.vocab_size = vocab_size
        self.states = states  # of rows that the drafter has not read yet; None: it reads no states
        self.learner: LearningDrafter | None = None  # the drafter, if it keeps the text of ended requests
        self.lookups: Lookups | None = None  # where it has drafts, they replace a model's
        self.chooser: DraftLength | None = None  # chooses how many drafts a step has; None: K, as the plan says
        self._chosen: int | None = None  # number of drafts that was chosen for the next launch; None: not yet
        self.num_failures = 0
        self._blamed_nobody = False
        self.num_stale = 0  # proposals dropped because draft KV has a gap, whose hidden states are gone

    def draft_len(self, scheduler: Scheduler) -> int:
        """K of the next step, which depends on the number of running requests; for a tree, its depth."""
        return 0 if self.speculation is None else draft_len_for_batch(self.speculation, len(scheduler.running))

    def wanted(self, batch: Batch, scheduler: Scheduler) -> int:
        """Number of drafts that the launch of a batch makes for each request.

        It is 0 if a drafter makes them, or no request can use any.
        """
        drafting = [row.request for row in batch if row.emits and row.request.max_draft_len > 0]
        chosen, self._chosen = self._chosen, None
        if self.chooser is None:
            chosen = self.num_drafts(self.draft_len(scheduler))
        elif chosen is None:
            chosen = self.chooser.make(self._limits(drafting, scheduler), len(batch))
        return chosen if drafting and self.drafts_inside else 0

    def repeats(
        self, requests: Sequence[Request], draft_len: int, scheduler: Scheduler, scores: Sequence[Sequence[float]] = ()
    ) -> bool:
        """Whether the next launch makes and verifies `draft_len` drafts of each request, as the last one did.

        If it makes another number, `wanted` returns that for the launch. False also where the drafter is to be asked
        first. scores: of the drafts of each request; () = there are none.
        """
        if self.asks(requests, scheduler):
            return False
        if self.chooser is None:
            return True
        B, limits = len(requests), self._limits(requests, scheduler)
        chosen = self.chooser.make(limits, B)
        if chosen == draft_len:
            own = {one.request_id: each[:draft_len] for one, each in zip(requests, scores, strict=False)}
            drafts = [Offer(one, draft_len, own.get(one, ())) for one, _ in limits if draft_len]
            if all(length == draft_len for length in self.chooser.verify(drafts, B)):
                return True
        self._chosen = chosen
        return False

    def asks(self, requests: Sequence[Request], scheduler: Scheduler) -> bool:
        """Whether any of the running requests wants drafts of the host for the next launch."""
        if not self.draft_len(scheduler):
            return False
        if self.lookups is not None:
            return bool(self._limits(requests, scheduler))
        if self.drafter is None:
            return False
        if self.chooser is None or not self.chooser.looks_up:
            return True
        limits = self._limits(requests, scheduler)
        return any(self.chooser.asks(source, len(requests)) for source, limit in limits if limit)

    def _limits(self, requests: Sequence[Request], scheduler: Scheduler) -> list[tuple[int, int]]:
        """Ids of the requests that take drafts, and the most drafts that each takes."""
        K, longest = self.draft_len(scheduler), self.longest(scheduler)
        return [
            (request.request_id, min(request.max_draft_len, K))
            for request in requests
            if request.speculates and request.max_draft_len > 0 and len(request.tokens) <= longest
        ]

    def longest(self, scheduler: Scheduler) -> int:
        """Largest number of tokens for which a draft model makes drafts, as the context of the model is limited."""
        assert self.speculation is not None
        return self.speculation.max_model_len - self.draft_len(scheduler)

    def propose(self, requests: Sequence[Request], scheduler: Scheduler) -> None:
        """Set `drafts` of the requests that may speculate in the next step.

        Drafts that the launch made are there already, and are cut to the number that may be used.
        """
        if self.speculation is None or not requests:
            return
        depths = [self._depth_limit(request, scheduler) for request in requests]
        lengths = allowed = [self._draft_len(*one, scheduler) for one in zip(requests, depths, strict=True)]
        if self.drafter is not None:
            if self.chooser is not None and self.chooser.looks_up:
                asks = [self.chooser.asks(request.request_id, len(scheduler.running)) for request in requests]
                lengths = [length if one else 0 for length, one in zip(lengths, asks, strict=True)]
            elif self.chooser is not None:
                lengths = [min(length, self.chooser.made) for length in lengths]
            self._ask([one for one in zip(requests, lengths, depths, strict=True) if one[1] > 0])
            self.read_in([one for one, length in zip(requests, lengths, strict=True) if length <= 0], READ_ROWS)
        elif self.drafts_inside:
            for request, length, depth in zip(requests, lengths, depths, strict=True):
                if self.shapes_trees:
                    _keep_within(request, depth)
                if length > 0 and request.kv.draft_kv_len < request.kv.committed:
                    self.num_stale += 1
                    request.drafts = []
                elif length < len(request.drafts):
                    request.drafts = request.drafts[: max(length, 0)]
        if self.lookups is not None:
            self._look_up(self.lookups, zip(requests, allowed, strict=True))
        for request, length, depth in zip(requests, allowed, depths, strict=True):
            request.num_own_drafts, request.is_cut = len(request.drafts), False
            if request.follows_grammar and length > 0 and request.speculates:
                self._follow_grammar(request, length, depth)
        if self.chooser is not None:
            drafting = [request for request in requests if request.drafts]
            drafts = [_offer(request) for request in drafting]
            for request, length in zip(drafting, self.chooser.verify(drafts, len(scheduler.running)), strict=True):
                request.drafts = request.drafts[:length]

    def read_in(self, requests: Sequence[Request], least: int = 1) -> None:
        """Compute draft KV of requests that make no drafts now, so that their states need not be kept.

        least: least number of rows for which it is worth a call, except after a prompt. States that cannot be read any
        more are forgotten.
        """
        if self.states is None:
            return
        behind = []
        for request in requests:
            if not self.may_draft(request) or self.states.begins_after(request, request.kv.draft_kv_len):
                self.states.forget(request)
                continue
            rows = min(request.kv.committed, len(request.tokens) - 1) - request.kv.draft_kv_len
            if rows >= (1 if request.num_output <= 1 else least):
                behind.append(request)
        self._ask([(request, 0, 0) for request in behind])

    def may_draft(self, request: Request) -> bool:
        """Whether the request may have drafts in this step or a later one."""
        assert self.speculation is not None
        fits = len(request.tokens) < self.speculation.max_model_len
        return request.speculates and request.max_draft_len > 0 and fits

    def wants_draft_kv(self, request: Request) -> bool:
        """Whether the request may take over only rows with draft KV.

        A draft model computes it later, from the tokens. Other draft layers cannot, without states of these rows.
        """
        has_room = request.length_limit > request.prompt_len + 2  # for a token, a draft and the token after it
        return self.drafts_inside or (self.states is not None and has_room and self.may_draft(request))

    def forget(self, request: Request) -> None:
        """Drop all state of a request that has ended."""
        if self.chooser is not None:
            self.chooser.forget(request.request_id)
        if self.states is not None:
            self.states.forget(request)
        if self.lookups is not None:
            self.lookups.forget(request.request_id)
        if self.drafter is not None:
            if self.learner is not None and request.speculates and request.num_output:
                learn = partial(self.learner.learn, request.request_id, ShownTokens(request.tokens), request.prompt_len)
                self._guarded(learn, request, "learn from", "drafts less of it")
            forget = partial(self.drafter.forget, request.request_id)
            self._guarded(forget, request, "forget", "may keep its memory")

    def _guarded(self, call: Callable[[], None], request: Request, what: str, result: str) -> None:
        """Call the drafter. If that fails, only its drafts and its memory can suffer."""
        try:
            call()
        except Exception as error:
            self.num_failures += 1
            logger.warning(
                "the drafter failed to %s request %d, and %s (%s: %s)",
                what,
                request.request_id,
                result,
                type(error).__name__,
                error,
            )

    @property
    def drafts_inside(self) -> bool:
        """Whether launches make the drafts."""
        return self.speculation is not None and self.speculation.mode.use_one_engine()

    @property
    def shapes_trees(self) -> bool:
        """Whether the drafts of each request are a tree of their own."""
        return self.speculation is not None and self.speculation.dynamic_tree is not None

    def _depth_limit(self, request: Request, scheduler: Scheduler) -> int:
        """Number of tokens that drafts may be ahead: within the drafter's context and the request's limits."""
        if not request.speculates:
            return 0
        length = len(request.tokens)
        here = self._in_context(length, self.draft_len(scheduler), scheduler)
        return max(min(here, request.max_draft_len, request.length_limit - length - 1), 0)

    def _draft_len(self, request: Request, depth: int, scheduler: Scheduler) -> int:
        """Number of drafts at most `depth` tokens ahead for which the request has blocks."""
        reserved = len(request.kv.blocks) * scheduler.allocator.block_size
        return min(self.num_drafts(depth), reserved - len(request.tokens) + 1)

    def num_drafts(self, depth: int) -> int:
        """Number of drafts that are at most `depth` tokens ahead."""
        return 0 if self.speculation is None else self.speculation.num_drafts_within(depth)

    def depth_of_trees(self, num_nodes: int) -> int:
        """Largest depth of the dynamic trees of so many nodes that a launch makes; 0 for other drafts."""
        tree = None if self.speculation is None else self.speculation.dynamic_tree
        return 0 if tree is None else tree.depth_of(num_nodes)

    def _in_context(self, length: int, K: int, scheduler: Scheduler) -> int:
        """Number of drafts after `length` tokens that fit the drafter's context.

        As in vLLM, a draft model makes all K drafts or none; drafts that are looked up are cut.
        """
        assert self.speculation is not None
        if self.speculation.mode.shapes_graphs():
            return K if length <= self.longest(scheduler) else 0
        return max(min(K, self.speculation.max_model_len - length - 1), 0)

    def _ask(self, asked: list[tuple[Request, int, int]]) -> None:
        """Call the drafter once for all requests, each with its number of drafts and the depth of a tree of them.

        If that fails, call it once for each request, with the same questions. A request that fails again is to blame,
        and goes on without speculation.
        """
        if self.states is not None:
            asked = [one for one in asked if self._can_be_read(one[0])]
        if not asked:
            return
        assert self.drafter is not None
        questions = tuple(
            question_to_drafter(request, length, depth if self.shapes_trees else None, self._unread(request))
            for request, length, depth in asked
        )
        try:
            answers = checked_proposal(self.drafter.propose(questions), questions, self.vocab_size)
        except DeviceError:
            raise  # no request is to blame
        except Exception as error:
            self.num_failures += 1
            if len(asked) == 1:
                self._give_up(asked[0][0], error)
                return
            for one in asked:
                self._ask([one])
            if all(request.speculates for request, *_ in asked):
                self._blame_nobody(error, len(asked))
            return
        for (request, _, depth), (drafts, parents, scores, kv_len) in zip(asked, answers, strict=True):
            request.drafts, request.draft_parents, request.draft_scores = drafts, parents, scores
            if self.shapes_trees:
                _keep_within(request, depth)
            request.kv.draft_kv_len = kv_len
            if self.states is not None:
                self.states.drop(request, kv_len)

    def _look_up(self, lookups: Lookups, asked: Iterable[tuple[Request, int]]) -> None:
        """Replace the drafts of requests whose text repeats itself. asked: each with the most drafts it can verify.

        A request with a grammar keeps its own drafts, as the grammar adds what it forces.
        """
        for request, most in asked:
            wants = most > 0 and request.speculates and request.guide is None
            found = lookups.find(request.request_id, request.tokens, most) if wants else []
            request.looked_up = bool(found)
            if found:
                made, request.drafts = request.drafts, found
                request.drop_draft_kv(made)

    def _follow_grammar(self, request: Request, length: int, depth: int) -> None:
        assert self.speculation is not None
        try:
            follow_grammar(request, self.speculation.tree, length, depth)
        except Exception as error:
            self.num_failures += 1
            request.follows_grammar, request.drafter_error = False, error
            logger.warning(
                "request %d goes on without drafts of its grammar, its output is not affected (%s: %s)",
                request.request_id,
                type(error).__name__,
                error,
            )

    def _give_up(self, request: Request, error: Exception) -> None:
        """Let the request go on as if there were no drafter."""
        request.speculates, request.drafter_error = False, error
        logger.warning(
            "request %d goes on without drafts, its output is not affected: the drafter failed (%s: %s)",
            request.request_id,
            type(error).__name__,
            error,
        )

    def _blame_nobody(self, error: Exception, count: int) -> None:
        if not self._blamed_nobody:
            self._blamed_nobody = True  # logged once: it may happen in every step
            logger.warning(
                "the drafter failed (%s: %s) when asked for %d requests at once, and not for each alone: drafting goes "
                "on, at the cost of asking twice",
                type(error).__name__,
                error,
                count,
            )

    def _unread(self, request: Request) -> Tensor | None:
        """Hidden states of the rows that are committed and not in draft KV.

        None: the drafter reads no states, or one is gone.
        """
        if self.states is None:
            return None
        return self.states.rows(request, request.kv.draft_kv_len, min(request.kv.committed, len(request.tokens) - 1))

    def _can_be_read(self, request: Request) -> bool:
        """Whether the drafter may read the request.

        False: its speculation has ended, or states are gone until a new prefill.
        """
        assert self.states is not None
        if not request.speculates or self._unread(request) is None:
            self.num_stale += int(request.speculates)
            self.states.forget(request)
            return False
        return True


def _offer(request: Request) -> Offer:
    """The drafts of a request, for DraftLength. Drafts that its grammar made or changed have no scores."""
    source, count = draft_source(request), len(request.drafts)
    own = source >= 0 and request.num_own_drafts == count
    return Offer(source, count, request.draft_scores[:count] if own else ())


def _keep_within(request: Request, depth: int) -> None:
    """Drop the drafts of a request's tree that are more than `depth` tokens ahead."""
    depths = node_depths(request.draft_parents[: len(request.drafts)])
    kept = [node for node, one in enumerate(depths) if one <= depth]
    if len(kept) < len(request.drafts):
        request.keep_drafts(kept)
