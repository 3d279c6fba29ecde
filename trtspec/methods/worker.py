"""One-engine speculation: the code that all workers share inside the target's graph.

Method names follow TensorRT-LLM. A worker takes and returns tensors, because it is exported with the target. Shapes are
as in core.py. K' = spec.next_draft_len is the number of drafts that this step makes for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.config.tree import Tree
from trtspec.core import (
    AttnMetadata,
    KVSpec,
    Proposal,
    SamplingTensors,
    SpecMetadata,
    StepInputs,
    StepOutputs,
    Verdict,
)
from trtspec.errors import ConfigError
from trtspec.methods.chain import ChainState, draft_chain
from trtspec.methods.draw import draw, draw_children, draw_drafts
from trtspec.methods.head import DraftHead
from trtspec.methods.tree import TreeTables, in_line
from trtspec.methods.tree_drafts import Drafts, Level
from trtspec.models.attention import PagedAttend
from trtspec.ops import spec_accept


class SpecWorker(nn.Module):
    """A worker that samples, accepts, and drafts with a head in the chain of methods.chain.

    A subclass drafts in another way. capture_layers: hidden states of the target that the worker reads, "after layer
    i", -1 = after the last norm. greedy: drafts are arg-max, whatever the requests ask for. confidence_threshold: see
    `likely_lens`; None = all drafts are verified. tree: the shape of the drafts, None = a chain. gives_scores: whether
    proposals have draft_scores. d2t: [Vd] int64, target id = draft id + d2t.
    """

    d2t: Tensor

    def __init__(
        self,
        head: DraftHead,
        max_draft_len: int,
        capture_layers: Sequence[int],
        greedy: bool = False,
        *,
        confidence_threshold: float | None = None,
        tree: Tree | None = None,
        gives_scores: bool = False,
    ) -> None:
        super().__init__()
        self.head = head
        ids = head.target_ids
        # no arithmetic on meta, as in RotaryTable
        d2t = torch.empty_like(ids) if ids.is_meta else ids - torch.arange(len(ids), device=ids.device)
        self.register_buffer("d2t", d2t, persistent=False)
        self.max_draft_len = max_draft_len
        self.capture_layers = tuple(capture_layers)
        self.greedy = greedy
        self.confidence_threshold = confidence_threshold
        self.gives_scores = gives_scores
        self.tree = None if tree is None else TreeTables.of(tree, ids.device)
        if self.tree is not None and self.tree.most_children > len(ids):
            raise ConfigError(
                f"the draft tree has {self.tree.most_children} children of a node, and the draft knows {len(ids)} ids; "
                "use fewer"
            )

    @classmethod
    def of(cls, head: DraftHead, speculation: SpeculationPlan) -> Self:
        """Make a worker of this head with the settings of the plan."""
        greedy = speculation.draft_sample_method == "greedy"
        capture, settings = speculation.capture_layers, cls.settings(speculation)
        return cls(head, speculation.num_speculative_tokens, capture, greedy, **settings)

    @classmethod
    def settings(cls, speculation: SpeculationPlan) -> dict[str, Any]:
        """Return the keyword arguments of the constructor."""
        tree = {} if speculation.tree is None else {"tree": speculation.tree}
        threshold = speculation.draft_confidence_threshold
        return {"confidence_threshold": threshold, "gives_scores": speculation.chooses_draft_len, **tree}

    # -- the passes of the head ---------------------------------------------------------------------------------------

    def first_pass(
        self,
        next_ids: Tensor,
        captured: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run the first pass over all T rows and return its output at `rows` [R], [R, H]; None = at all rows.

        next_ids: [T], the token after each row. captured: [T, n * Ht], the target's captured states. positions: [T].
        """
        return self.head(next_ids, self.head.fuse(captured), positions, attend, rows=rows)  # type: ignore[no-any-return]

    def next_pass(self, step: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        """Run pass `step` (1..K'-1) over one row per request, or n for a tree, and return its output [B * n, H].

        tokens: [B * n]. hidden: [B * n, H], the output of the pass before for each row. positions: [B * n].
        """
        return self.head(tokens, self.head.feedback(hidden, step - 1), positions, attend, step)  # type: ignore[no-any-return]

    def draft_logits(self, step: int, hidden: Tensor) -> Tensor:
        """Return logits [B, Vd] fp32 over the draft vocabulary for hidden [B, H] of pass `step` (0..K'-1)."""
        return self.head.logits(hidden, step)

    @property
    def draft_ids(self) -> Tensor:
        """Draft id of each target id, [V] int64; -1 where there is none."""
        return self.head.draft_ids

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """KV layers of the worker; in the target's graph they come after the target's."""
        return self.head.kv_layers

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that the K' = max_draft_len passes of one step read."""
        return self.head.weight_bytes_for(self.max_draft_len)

    @property
    def draft_rows(self) -> int:
        """Rows of draft logits that a pass makes for each request. With a tree: most nodes of a depth with children."""
        return 1 if self.tree is None else self.tree.most_inner

    # -- the step -----------------------------------------------------------------------------------------------------

    def forward(self, inputs: StepInputs, captured: Tensor, logits: Tensor, attend: PagedAttend) -> StepOutputs:
        """Accept drafts, make the next ones, and return all outputs of the step but the logits.

        captured: [T, n * Ht], states of the target. logits: [R, V] fp32 of the target.
        """
        spec = inputs.spec
        sampled = self.sample_tokens_for_batch(logits, spec)
        verdict = self.sample_and_accept_draft_tokens(sampled, spec)
        accepted, counts = verdict.tokens, verdict.num_tokens
        depth = 0 if self.tree is None else self.tree.depth_within(spec.runtime_draft_len)
        if verdict.path is not None and depth:
            inputs, captured = in_line(inputs, captured, verdict.path[:, : depth + 1])
            spec, attend = inputs.spec, attend.at(inputs.attn)
        rejected = spec.draft_lens - (counts - 1).clamp(min=0).int()  # [B] rows to rewind
        hidden, rows = self.read_in(inputs, captured, accepted, counts, attend)
        made = self.draft(hidden, counts, rows.kv_lens - rejected, rows, spec, attend)
        return StepOutputs(
            tokens=sampled,
            verdict=verdict,
            proposal=made,
            next_new_tokens=self.prepare_next_new_tokens(accepted, counts, made.draft_tokens, made.draft_lens),
            next_kv_lens=inputs.attn.kv_lens - rejected,
        )

    def read_in(
        self, inputs: StepInputs, captured: Tensor, accepted: Tensor, counts: Tensor, attend: PagedAttend
    ) -> tuple[Tensor, AttnMetadata]:
        """Run the first draft pass, after acceptance.

        It runs over all rows, those of rejected drafts too: attention is causal, so the last row that is kept is right.
        Returned are its output at the `drafting_rows`, and the rows that it covers.

        accepted: [B, K+1], the emitted tokens, -1 past `counts`. counts: [B], their number: accepted drafts + 1.
        """
        attn = inputs.attn
        ids = self.prepare_context_input_ids(inputs.input_ids, accepted, attn, inputs.spec)
        rows = self.drafting_rows(counts, attn, inputs.spec)
        return self.first_pass(ids, captured, attn.positions(ids.shape[0]), attend, rows), attn

    def drafting_rows(self, counts: Tensor, attn: AttnMetadata, spec: SpecMetadata) -> Tensor:
        """Return the row of the first pass from which each request drafts: the last one that is kept, [B] int64.

        counts: [B], number of new tokens of each request. attn: the rows of the pass.
        """
        return attn.cu_q_lens[1:].long() - 1 - spec.draft_lens + (counts - 1).clamp(min=0)

    def draft(
        self,
        hidden: Tensor,  # [B, H] of the first pass, at its `drafting_rows`
        counts: Tensor,  # [B] number of new tokens of each request
        kv_lens: Tensor,  # [B] int32, KV length up to the last row that is kept
        attn: AttnMetadata,  # rows of the first pass
        spec: SpecMetadata,
        attend: PagedAttend,
    ) -> Proposal:
        """Return the drafts for the next step, [B, K'] int64, and the number to verify per request, [B] int32."""
        if spec.next_draft_len == 0:
            return self.no_drafts(spec)
        sampling = self.draft_sampling(counts, spec)
        kept, probs = replace(attn, kv_lens=kv_lens), self.new_probs()
        if self.tree is not None:
            drafts, parents, there = self.draft_tree_from(hidden, kept, sampling, spec.next_draft_len, attend)
            lens = self.draft_lens(drafts, hidden, spec)
            return Proposal(drafts, lens if there is None else lens.minimum(there.int()), draft_parents=parents)
        drafts = self.draft_from(hidden, kept, sampling, spec.next_draft_len, attend, probs)
        return self.proposal(drafts, self.draft_lens(drafts, hidden, spec), probs)

    def proposal(self, drafts: Tensor, lens: Tensor, probs: Sequence[Tensor] | None) -> Proposal:
        """Return the drafts [B, K'] of a chain, of which `lens` [B] int32 are worth verifying. probs: [B] by pass."""
        scores = torch.stack(tuple(probs), dim=1) if self.gives_scores and probs else None
        return Proposal(drafts, self.likely_lens(lens, probs), draft_scores=scores)

    def no_drafts(self, spec: SpecMetadata) -> Proposal:
        """Return the result of `draft` for K' = 0: [B, 0] int64, [B] int32."""
        none = spec.draft_tokens.new_empty(spec.batch_size, 0)
        parents = none if self.tree is not None and self.tree.is_dynamic else None
        scores = none.float() if self.gives_scores else None
        return Proposal(none, torch.zeros_like(spec.draft_lens), draft_parents=parents, draft_scores=scores)

    def draft_lens(self, drafts: Tensor, hidden: Tensor, spec: SpecMetadata) -> Tensor:
        """Return the number of drafts of each request that are worth verifying, 0..K', [B] int32.

        By default all of them are; a subclass may return fewer. The result changes no token. drafts: [B, K'] int64,
        made from `hidden` as in `draft`.
        """
        return torch.full_like(spec.draft_lens, spec.next_draft_len)

    def new_probs(self) -> list[Tensor] | None:
        """Return a list for the probabilities of drafts; None = nobody asks for them."""
        return [] if self.gives_scores or self.confidence_threshold is not None else None

    def likely_lens(self, lens: Tensor, probs: Sequence[Tensor] | None) -> Tensor:
        """Return `lens` [B] int32, cut before the first draft whose predicted chance is below the threshold.

        The chance is the product of the probabilities of the draft and of those before it. probs: [B] fp32 by pass, the
        probability that the draft layers give their draft, without temperature, filters and noise. On real text this
        is close to the share of drafts that are accepted, sampled ones too. The cut changes no token.
        """
        if probs is None or self.confidence_threshold is None:
            return lens
        accepted, likely = torch.ones_like(probs[0]), torch.zeros_like(lens)
        for prob in probs:
            accepted = accepted * prob
            likely = likely + (accepted >= self.confidence_threshold).int()  # of NaN: False
        return torch.where(likely < lens, likely, lens)

    def draft_sampling(self, counts: Tensor, spec: SpecMetadata) -> SamplingTensors:
        """Return how to sample the first draft of each request, after its `counts` [B] new tokens."""
        sampling = spec.sampling.select(spec.logits_rows()[:, 0])
        return replace(sampling, positions=sampling.positions + (counts - 1).clamp(min=0) + 1)

    def draft_from(
        self,
        hidden: Tensor,
        attn: AttnMetadata,
        sampling: SamplingTensors,
        num_drafts: int,
        attend: PagedAttend,
        probs: list[Tensor] | None = None,
    ) -> Tensor:
        """Return drafts [B, num_drafts] int64, and append the probabilities [B] of each pass to `probs`.

        hidden: [B, H] of the last row that each request keeps. attn: the rows, with the KV lengths that are kept.
        sampling: of the first draft.
        """
        moves = self.head.advance_draft_positions
        rows = attn.advance() if moves else attn.last_rows()
        start = ChainState(self.sample_drafts(0, hidden, sampling, probs), rows, sampling.advance(), hidden)

        def forward(step: int, state: ChainState) -> tuple[Tensor, Tensor]:
            assert state.hidden is not None
            positions = state.attn.kv_lens.long() - 1  # one row per request, its last
            after = self.next_pass(step, state.tokens, state.hidden, positions, attend.at(state.attn))
            return self.sample_drafts(step, after, state.sampling, probs), after

        return draft_chain(start, num_drafts, forward, moves)

    def draft_tree_from(
        self, hidden: Tensor, attn: AttnMetadata, sampling: SamplingTensors, num_drafts: int, attend: PagedAttend
    ) -> Drafts:
        """Return the drafts of the tree, [B, num_drafts] int64; arguments as in `draft_from`."""
        assert self.tree is not None

        def run(step: int, level: Level) -> Tensor:
            positions = level.attn.positions(level.tokens.shape[0])
            return self.next_pass(step, level.tokens, level.hidden, positions, attend.at(level.attn))

        reads = self.head.reads_drafts
        return self.tree.draft(hidden, attn, sampling, run if reads else None, self.sample_children, num_drafts)

    def sample_children(
        self, step: int, hidden: Tensor, sampling: SamplingTensors, count: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the `count` likeliest guesses after each row, best first, [R, count] int64 target ids, and scores.

        These are the largest of the processed logits plus the target's noise at that position; if `greedy`, of the
        logits. The scores are these sums, [R, count] fp32; None for a tree of a fixed shape. hidden: [R, H] of pass
        `step`.
        """
        assert self.tree is not None
        logits = self.draft_logits(step, hidden)
        if self.greedy:
            scores, best = logits.topk(count, dim=-1)
            return best + self.d2t[best], scores
        ids = torch.arange(logits.shape[1], device=logits.device) + self.d2t
        return draw_children(logits, sampling, ids, self.draft_ids, count, self.tree.is_dynamic)

    def sample_tokens_for_batch(self, logits: Tensor, spec: SpecMetadata) -> Tensor:
        """Sample the target's own token at each logits row, as its request asks: [R, V] fp32 -> [R] int64."""
        return draw(logits, spec.sampling, constraints=spec.constraints)

    def sample_and_accept_draft_tokens(self, sampled: Tensor, spec: SpecMetadata) -> Verdict:
        """Accept strictly; return the new tokens.

        New tokens are the accepted drafts and the target's own token after them.

        sampled: [R], the target's own tokens.
        """
        spec = replace(spec, forced_accept=self.apply_force_accepted_tokens(spec))
        if self.tree is not None:
            return self.tree.accepted(sampled, spec)
        own, drafts, emits = spec.per_request(sampled), spec.drafts_per_request(), spec.next_prompt_token < 0
        return Verdict(*spec_accept(own, drafts, spec.draft_lens, spec.forced_accept, emits=emits))

    def apply_force_accepted_tokens(self, spec: SpecMetadata) -> Tensor:
        """Number of drafts to accept whatever their values, [B] int32; -1 = only those that agree.

        Only generation requests can have forced drafts.
        """
        request = torch.arange(spec.batch_size, device=spec.forced_accept.device)
        return torch.where(request < spec.num_contexts, -1, spec.forced_accept)

    def prepare_context_input_ids(
        self, input_ids: Tensor, accepted: Tensor, attn: AttnMetadata, spec: SpecMetadata
    ) -> Tensor:
        """Return the token after each row, [T] int64: the input ids of the first draft pass.

        Inside a prompt this is the next prompt token. After a chunk it is the token that the host knows
        (next_prompt_token). Where the request samples, it is the token accepted there. Rows of rejected drafts get id
        0; no code reads their output.
        """
        T = input_ids.shape[0]
        request = attn.requests(T)
        draws = (attn.cu_q_lens[1:].long() - 1 - spec.draft_lens)[request]  # row of the last known token
        offset = torch.arange(T, device=input_ids.device) - draws  # negative: the next token is known
        known = spec.next_prompt_token[request]
        drawn = accepted[request, offset.clamp(min=0)]
        after = torch.where(offset < 0, input_ids.roll(-1), torch.where(known >= 0, known, drawn))
        return after.clamp(0, self.draft_ids.shape[0] - 1)  # also where no token could be sampled

    def prepare_next_new_tokens(self, accepted: Tensor, counts: Tensor, drafts: Tensor, draft_lens: Tensor) -> Tensor:
        """Return the input ids of the next step: last accepted token and drafts, [B, K'+1] int64.

        Ids past draft_lens [B] are -1.
        """
        last = accepted.gather(1, (counts - 1).clamp(min=0)[:, None])
        offered = torch.arange(drafts.shape[1], device=drafts.device) < draft_lens[:, None]
        return torch.cat((last, torch.where(offered, drafts, -1)), dim=1)

    def sample_drafts(
        self, step: int, hidden: Tensor, sampling: SamplingTensors, probs: list[Tensor] | None = None
    ) -> Tensor:
        """Sample drafts [B] int64, as target ids, from hidden [B, H] of pass `step`.

        The noise is the one that the target will use at the same positions. The drafts' probabilities [B] fp32 (see
        likely_lens) are appended to `probs`.
        """
        return self.draw_from(self.draft_logits(step, hidden), sampling, probs)

    def draw_from(self, logits: Tensor, sampling: SamplingTensors, probs: list[Tensor] | None = None) -> Tensor:
        """Sample drafts [B] int64 from draft logits [B, Vd] fp32, and append to `probs`, as `sample_drafts` does."""
        if self.greedy:
            drafts = self.draft_sampler_greedy(logits, self.d2t)
        else:
            ids = torch.arange(logits.shape[1], device=logits.device) + self.d2t
            drafts = draw_drafts(logits, sampling, ids, self.draft_ids)
        if probs is not None:
            chosen = logits.gather(1, self.draft_ids[drafts].clamp(min=0)[:, None])
            probs.append(1 / (logits - chosen).exp().sum(1))  # softmax, written with operators that TensorRT has
        return drafts

    def draft_sampler_greedy(self, logits: Tensor, d2t: Tensor) -> Tensor:
        """Return the arg-max of logits [B, Vd] as target ids, [B] int64."""
        best = logits.argmax(-1)
        return best + d2t[best]
