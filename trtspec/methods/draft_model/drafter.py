"""A smaller model that drafts next to the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.core import AttnMetadata, Proposal, SamplingTensors, SpecMetadata, StepInputs
from trtspec.methods.chain import run_chain
from trtspec.methods.drafter import CHAIN_ROWS, ChainExecutable, DraftModel
from trtspec.methods.head_drafter import HeadDrafter
from trtspec.methods.rows import pack_rows
from trtspec.protocols import Drafter, DraftRequest, Executable


class ChainDrafter:
    """A drafter that runs a smaller model whose KV lies under the target's block ids.

    The model takes and returns the target's ids; a model with other ids translates them itself
    (methods.draft_model.translated).

    The first pass covers all known tokens whose draft KV is missing. These are the whole prompt at first, and later the
    last one or two tokens, or all tokens since speculation last ran. The first pass draws the first draft; each further
    pass feeds the previous draft back. Draws use the request's own sampling and noise, so that target and draft agree
    as often as they can; `greedy` takes the arg-max instead. With `chain`, the same passes are one launch.
    """

    def __init__(
        self, model: Executable, max_num_tokens: int, greedy: bool = False, chain: ChainExecutable | None = None
    ) -> None:
        self.model = model
        self.max_num_tokens = max_num_tokens
        self.greedy = greedy
        self.chain = chain

    @classmethod
    def of(cls, speculation: SpeculationPlan, model: DraftModel | None, max_num_tokens: int) -> Drafter:
        """Return the drafter of the draft model that was loaded: a HeadDrafter for a tree, as one launch makes it."""
        assert model is not None
        if speculation.tree is not None:
            return HeadDrafter.of(speculation, model, max_num_tokens)
        greedy = speculation.draft_sample_method == "greedy"
        return cls(model.executable, max_num_tokens, greedy, model.chain)

    def forget(self, request_id: int) -> None:
        """Do nothing: the drafter keeps no state outside the KV cache."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Return max_draft_len drafts for each request, in order."""
        # A request that wants fewer than K drafts runs all passes, too; the KV past its blocks goes to scratch.
        K = max(request.max_draft_len for request in requests)
        starts = [request.draft_kv_len for request in requests]
        drafts = self._in_one_launch(requests, K, starts)
        if drafts is None:
            drafts = self._pass_by_pass(requests, K, starts)
        draft_lens = torch.tensor([request.max_draft_len for request in requests], dtype=torch.int32)
        known = torch.tensor([len(request.tokens) for request in requests], dtype=torch.int32)
        return Proposal(drafts, draft_lens, draft_kv_lens=known + draft_lens - 1)  # the last draft was never fed back

    def _in_one_launch(self, requests: Sequence[DraftRequest], num_tokens: int, starts: list[int]) -> Tensor | None:
        """Drafts [B, K], or None if there is no single launch for these requests.

        Tokens before the launch's rows whose draft KV is missing are prefilled first: a prompt, or what was generated
        without speculation. starts: lengths of the draft KV, which are updated.
        """
        lens = [len(request.tokens) for request in requests]
        if self.chain is None or min(lens) < CHAIN_ROWS:
            return None
        self._read_in(requests, starts, [length - CHAIN_ROWS for length in lens])
        starts[:] = [max(start, length - CHAIN_ROWS) for start, length in zip(starts, lens, strict=True)]
        inputs = self._inputs(requests, [CHAIN_ROWS] * len(requests), lens)
        ids = [token for request in requests for token in request.tokens[-CHAIN_ROWS:]]
        return self.chain.run_chain(replace(inputs, input_ids=torch.tensor(ids)), num_tokens)

    def _pass_by_pass(self, requests: Sequence[DraftRequest], num_tokens: int, starts: Sequence[int]) -> Tensor:
        """Drafts [B, K], with a launch for each pass. starts: lengths of the draft KV."""
        lens = [len(request.tokens) for request in requests]
        first = self._read_in(requests, starts, lens)
        inputs = self._inputs(requests, [1] * len(requests), lens)
        return run_chain(lambda inputs: self.model.run(inputs).tokens, inputs, num_tokens, first)

    def _read_in(self, requests: Sequence[DraftRequest], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Prefill every request's draft KV from `starts` up to `ends` and return the tokens drawn there, [B] int64.

        The value is arbitrary for a request whose KV already reaches its end.
        """
        first = torch.empty(len(requests), dtype=torch.int64)
        for pieces in pack_rows(starts, ends, self.max_num_tokens):
            owners = [requests[b] for b, _, _ in pieces]
            ids = [token for b, start, end in pieces for token in requests[b].tokens[start:end]]
            inputs = self._inputs(owners, [end - start for _, start, end in pieces], [end for _, _, end in pieces])
            # A piece that ends before its request does draws a token, too; the request's last piece overwrites it.
            first[[b for b, _, _ in pieces]] = self.model.run(replace(inputs, input_ids=torch.tensor(ids))).tokens
        return first

    def _inputs(self, requests: Sequence[DraftRequest], q_lens: list[int], kv_lens: list[int]) -> StepInputs:
        """Inputs of q_lens[b] rows up to kv_lens[b] that draw token kv_lens[b] of each request, without input ids."""
        rows = [replace(r.sampling, greedy=True, temperature=0.0) if self.greedy else r.sampling for r in requests]
        attn = AttnMetadata.of(q_lens, kv_lens, [request.block_table for request in requests])
        spec = SpecMetadata.plain([r.request_id for r in requests], attn, SamplingTensors.of(rows, kv_lens))
        return StepInputs(torch.empty(0, dtype=torch.int64), attn, spec)
