"""THE autoregressive draft loop, and the drafter that runs a smaller model through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtspec.core import AttnMetadata, Proposal, SamplingTensors, SpecMetadata, StepInputs
from trtspec.methods.drafter import CHAIN_ROWS, ChainExecutable, DraftResources
from trtspec.methods.rows import pack_rows
from trtspec.protocols import DraftRequest, Executable


@dataclass(frozen=True)
class ChainState:
    """Between two passes of a chain: the drafts just made, and where their own pass would run."""

    tokens: Tensor  # [B] int64
    attn: AttnMetadata  # one row per request: that of `tokens`, or, where positions stay, the last that is known
    sampling: SamplingTensors  # of B rows: how the token after `tokens` is drawn
    hidden: Tensor | None = None  # [B, H], or [B, rows, H]: what a head reads beside them


Forward = Callable[[int, ChainState], tuple[Tensor, Tensor | None]]
"""Pass number (1..K-1) and the state it starts from -> the next drafts [B] and their hidden states."""


def draft_chain(state: ChainState, num_tokens: int, forward: Forward, advance_positions: bool = True) -> Tensor:
    """K drafts per request, [B, K] int64: state.tokens, then one pass of one row per request for each further one.

    advance_positions False: all of these passes stand where state.attn says; only what is drawn moves on.
    """
    drafts = [state.tokens]
    for step in range(1, num_tokens):
        tokens, hidden = forward(step, state)
        attn = state.attn.advance() if advance_positions else state.attn
        state = ChainState(tokens, attn, state.sampling.advance(), hidden)
        drafts.append(tokens)
    return torch.stack(drafts, dim=1)


Pass = Callable[[StepInputs], Tensor]
"""A model's rows -> the token drawn after each request's last one, [B]."""


def run_chain(run: Pass, inputs: StepInputs, num_tokens: int, first: Tensor | None = None) -> Tensor:
    """Drafts of a model, [B, K] int64: a pass over the rows of `inputs` draws the first ones, and a pass over each but
    the last of them the next. `first` [B]: what the first pass drew, if it was run already."""
    tokens = run(inputs) if first is None else first
    attn, sampling = inputs.attn.advance(), inputs.spec.sampling.advance()
    spec = SpecMetadata.plain(inputs.spec.request_ids, attn, sampling)

    def forward(step: int, state: ChainState) -> tuple[Tensor, None]:
        return run(StepInputs(state.tokens, state.attn, replace(spec, sampling=state.sampling))), None

    return draft_chain(ChainState(tokens, attn, sampling), num_tokens, forward)


class ChainDrafter:
    """Drafts with a smaller model whose KV lives under the target's block ids. It speaks the target's ids: if its own
    are others, that is for the model to know (methods.draft_model.translated).

    The first pass covers all known tokens whose draft KV is missing: the whole prompt at first, later the last one or
    two tokens, or everything since speculation last ran. It draws the first draft; each further pass feeds the previous
    draft back. Draws use the request's own sampling and noise, so that target and draft agree as often as they can;
    `greedy` takes the arg-max instead. With `chain`, the same passes are one launch.
    """

    def __init__(
        self, model: Executable, max_num_tokens: int, greedy: bool = False, chain: ChainExecutable | None = None
    ) -> None:
        self.model = model
        self.max_num_tokens = max_num_tokens
        self.greedy = greedy
        self.chain = chain

    @classmethod
    def from_resources(cls, resources: DraftResources) -> ChainDrafter:
        """See base.BuildableDrafter."""
        greedy = resources.speculation.draft_sample_method == "greedy"
        model = resources.draft_model()
        return cls(model.executable, resources.max_num_tokens, greedy, model.chain)

    def forget(self, request_id: int) -> None:
        """Nothing is kept outside the cache."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """See protocols.Drafter."""
        # A request that wants fewer than K runs along: what it writes past its blocks lands in scratch.
        K = max(request.max_draft_len for request in requests)
        drafts = self._in_one_launch(requests, K)
        if drafts is None:
            drafts = self._pass_by_pass(requests, K)
        draft_lens = torch.tensor([request.max_draft_len for request in requests], dtype=torch.int32)
        known = torch.tensor([len(request.tokens) for request in requests], dtype=torch.int32)
        return Proposal(drafts, draft_lens, draft_kv_lens=known + draft_lens - 1)  # the last draft was never fed back

    def _in_one_launch(self, requests: Sequence[DraftRequest], num_tokens: int) -> Tensor | None:
        """The drafts [B, K], None where there is no launch for these. What is missing before its rows is read in first:
        a prompt, or what was said while nobody speculated."""
        lens = [len(request.tokens) for request in requests]
        if self.chain is None or min(lens) < CHAIN_ROWS:
            return None
        self._read_in(requests, [length - CHAIN_ROWS for length in lens])
        inputs = self._inputs(requests, [CHAIN_ROWS] * len(requests), lens)
        ids = [token for request in requests for token in request.tokens[-CHAIN_ROWS:]]
        return self.chain.run_chain(replace(inputs, input_ids=torch.tensor(ids)), num_tokens)

    def _pass_by_pass(self, requests: Sequence[DraftRequest], num_tokens: int) -> Tensor:
        """The drafts, [B, K]."""
        lens = [len(request.tokens) for request in requests]
        first = self._read_in(requests, lens)
        inputs = self._inputs(requests, [1] * len(requests), lens)
        return run_chain(lambda inputs: self.model.run(inputs).tokens, inputs, num_tokens, first)

    def _read_in(self, requests: Sequence[DraftRequest], ends: Sequence[int]) -> Tensor:
        """Bring every request's draft KV up to `ends` and draw there, [B] int64; anything where it is there already."""
        first = torch.empty(len(requests), dtype=torch.int64)
        for pieces in pack_rows([request.draft_kv_len for request in requests], ends, self.max_num_tokens):
            owners = [requests[b] for b, _, _ in pieces]
            ids = [token for b, start, end in pieces for token in requests[b].tokens[start:end]]
            inputs = self._inputs(owners, [end - start for _, start, end in pieces], [end for _, _, end in pieces])
            # A piece that ends before its request does draws too, and is overwritten by the request's last piece.
            first[[b for b, _, _ in pieces]] = self.model.run(replace(inputs, input_ids=torch.tensor(ids))).tokens
        return first

    def _inputs(self, requests: Sequence[DraftRequest], q_lens: list[int], kv_lens: list[int]) -> StepInputs:
        """Rows up to kv_lens[b], drawing token kv_lens[b] of each request; input ids are left to the caller."""
        rows = [replace(r.sampling, greedy=True, temperature=0.0) if self.greedy else r.sampling for r in requests]
        attn = AttnMetadata.of(q_lens, kv_lens, [request.block_table for request in requests])
        spec = SpecMetadata.plain([r.request_id for r in requests], attn, SamplingTensors.of(rows, kv_lens))
        return StepInputs(torch.empty(0, dtype=torch.int64), attn, spec)
