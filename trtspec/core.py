"""One page of nouns: the values that flow through a step. protocols.py has the interfaces that produce and take them.

The values are frozen views of tensors. The letters of their shapes:
- B: requests of the batch, C contexts first, then G generations.
- T: packed rows.
- K: draft tokens of the step: those of its longest proposal, rounded up to a K that compiled graphs have. With draft
  trees it is the number of nodes, in all but ancestors: there it is the depth. Drafts are then in an order in which
  every node comes after its parent.
- R <= T: logits rows, one per context, and one per draft and one more per generation.
- M: columns of the block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.modes import SpeculativeDecodingMode
from trtspec.sampling_params import RequestSampling

KVLayer = tuple[Tensor, Tensor]
"""(k_cache, v_cache) of one layer, each [num_blocks, block_size, Hkv, D]; block 0 is scratch."""


class KVSpec(NamedTuple):
    """Shape of one KV layer of a model, and the number of tokens back that it attends to."""

    num_heads: int
    head_dim: int
    window: int | None = None  # tokens; None: all

    @property
    def elements_per_token(self) -> int:
        """Elements of K and V together."""
        return 2 * self.num_heads * self.head_dim


def row_requests(cu_q_lens: Tensor, num_rows: int) -> Tensor:
    """Request of each packed row, [T] int64: the number of requests that end at or before it. cu_q_lens: [B+1]."""
    rows = torch.arange(num_rows, device=cu_q_lens.device)
    return (cu_q_lens[1:] <= rows[:, None]).sum(1)


def row_positions(cu_q_lens: Tensor, kv_lens: Tensor, request: Tensor) -> Tensor:
    """Position of each packed row in its sequence, [T] int64; `request` [T] is the owner of each row.

    The rows of a request are the last of its kv_lens tokens.
    """
    ends = cu_q_lens[1:].long()
    return torch.arange(request.shape[0], device=cu_q_lens.device) - ends[request] + kv_lens.long()[request]


@dataclass(frozen=True)
class AttnMetadata:
    """The rows of each request, and the location of their KV. The graph derives positions and slots from these."""

    cu_q_lens: Tensor  # [B+1] int32, request b owns rows cu_q_lens[b] .. cu_q_lens[b+1]-1
    kv_lens: Tensor  # [B] int32, tokens of the sequence, this step's rows included
    block_tables: Tensor  # [B, M] int32, 0 = scratch
    tree_mask: Tensor  # [T, W] int32 (see ops.spec_attention), zero-size = causal
    width: int = 0  # rows of each request, if all have the same number and graphs may rely on it; 0 = see cu_q_lens
    # [n-1, B, M'] int32, tables of the KV groups after the first (kv/groups.py); None = all groups use block_tables
    group_tables: Tensor | None = None
    tree_base: Tensor | None = None  # [B] int32, first row of the draft tree (see ops.spec_attention); None = chains
    ancestors: Tensor | None = None  # [T, K] int32, places of each row's nodes in the tree, counted from tree_base

    @classmethod
    def of(cls, q_lens: Sequence[int], kv_lens: Sequence[int], block_tables: Sequence[Sequence[int]]) -> AttnMetadata:
        """Build it from host lists with one entry per request. Block tables are padded with scratch to the longest."""
        return cls(
            cu_q_lens=torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            block_tables=cls.pad_tables(block_tables),
            tree_mask=torch.empty(0, dtype=torch.int32),
        )

    @staticmethod
    def pad_tables(block_tables: Sequence[Sequence[int]]) -> Tensor:
        """Block tables as a tensor [B, M] int32, padded with scratch to the longest."""
        width = max(len(table) for table in block_tables)
        return torch.tensor([[*table, *[0] * (width - len(table))] for table in block_tables], dtype=torch.int32)

    @property
    def batch_size(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def slot_rows(self) -> Tensor:
        """Zeros [n] int32, with n = rows of the request that has most of them in this step."""
        return torch.zeros(int(self.cu_q_lens.diff().max()), dtype=torch.int32)

    def requests(self, num_rows: int) -> Tensor:
        """Request that each of the T rows belongs to, [T] int64."""
        if self.width:
            return torch.arange(num_rows, device=self.kv_lens.device) // self.width
        return row_requests(self.cu_q_lens, num_rows)

    def positions(self, num_rows: int) -> Tensor:
        """Position of each of the T rows in its own sequence, [T] int64."""
        request = self.requests(num_rows)
        positions = row_positions(self.cu_q_lens, self.kv_lens, request)
        if self.ancestors is None or self.tree_base is None:
            return positions
        depth = (self.ancestors >= 0).sum(1)
        return torch.where(depth > 0, self.tree_base.long()[request] + depth - 1, positions)

    def tables_of(self, group: int) -> Tensor:
        """Block tables of a KV group, [B, M] int32."""
        return self.block_tables if group == 0 or self.group_tables is None else self.group_tables[group - 1]

    def keep(self, kept: Tensor) -> AttnMetadata:
        """The same rows, but the KV of requests that are not `kept`, [B] bool, lies in scratch."""
        groups = self.group_tables
        return replace(
            self,
            block_tables=torch.where(kept[:, None], self.block_tables, 0),
            group_tables=None if groups is None else torch.where(kept[:, None], groups, 0),
        )

    def widen(self, more: int) -> AttnMetadata:
        """The same requests, each with `more` further rows after those that it has."""
        before = torch.arange(self.batch_size + 1, dtype=torch.int32, device=self.kv_lens.device)
        return replace(
            self,
            cu_q_lens=self.cu_q_lens + more * before,
            kv_lens=self.kv_lens + more,
            width=self.width + more if self.width else 0,
        )

    def last_rows(self) -> AttnMetadata:
        """Only the last row of each request."""
        starts = torch.arange(self.batch_size + 1, dtype=torch.int32, device=self.kv_lens.device)
        none = self.tree_mask.new_empty(0)
        return replace(self, cu_q_lens=starts, tree_mask=none, width=1, tree_base=None, ancestors=None)

    def advance(self) -> AttnMetadata:
        """The next autoregressive step: one row per request, one token further."""
        return replace(self.last_rows(), kv_lens=self.kv_lens + 1)


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters per logits row; zero-size = no row of the batch uses the field (see ops.process_logits)."""

    greedy: Tensor  # [R] bool
    positions: Tensor  # [R] int64, absolute index of the token that the row draws
    seeds: Tensor  # [R] int64
    temperatures: Tensor  # [R] fp32, 0 on greedy rows
    top_ks: Tensor  # [R] int32
    top_ps: Tensor  # [R] fp32
    min_ps: Tensor  # [R] fp32
    ban_ids: Tensor  # [R, n] int32, -1 padded: ids that cannot be drawn ...
    ban_until: Tensor  # [R, n] int64: ... at positions below this

    @classmethod
    def of(cls, asked: Sequence[RequestSampling], positions: Sequence[int]) -> SamplingTensors:
        """Build the tensors of R logits rows. Row r draws the token at positions[r], as asked[r] says."""

        # Built with numpy: if the host calls few torch ops, their code stays out of memory and caches.
        def tensor(values: Sequence[object], dtype: type[np.generic]) -> Tensor:
            return torch.from_numpy(np.array(values, dtype=dtype))

        sampled = not all(one.greedy for one in asked)
        top_ks = [one.top_k for one in asked] if any(one.top_k for one in asked) else []
        top_ps = [one.top_p for one in asked] if any(one.top_p < 1 for one in asked) else []
        min_ps = [one.min_p for one in asked] if any(one.min_p for one in asked) else []
        width = max(len(one.ban_ids) for one in asked)
        bans = [[*one.ban_ids, *[-1] * (width - len(one.ban_ids))] for one in asked]
        return cls(
            greedy=tensor([one.greedy for one in asked], np.bool_),
            positions=torch.from_numpy(np.array(positions, dtype=np.int64)),
            seeds=tensor([one.seed for one in asked] if sampled else [], np.int64),
            temperatures=tensor([one.temperature for one in asked] if sampled else [], np.float32),
            top_ks=tensor(top_ks, np.int32),
            top_ps=tensor(top_ps, np.float32),
            min_ps=tensor(min_ps, np.float32),
            ban_ids=tensor(bans, np.int32),
            ban_until=tensor([[one.ban_until] * width for one in asked], np.int64),
        )

    def advance(self) -> SamplingTensors:
        """The same rows, each of which draws its next token."""
        return replace(self, positions=self.positions + 1)

    def expand(self, owners: np.ndarray, positions: Tensor) -> SamplingTensors:
        """The tensors of R rows. Row r draws the token at positions[r], as row owners[r] of these does.

        owners: [R] int64. positions: [R] int64, kept as they are.
        """

        def rows(tensor: Tensor) -> Tensor:
            return torch.from_numpy(tensor.numpy()[owners]) if tensor.shape[0] else tensor

        return SamplingTensors(
            greedy=rows(self.greedy),
            positions=positions,
            seeds=rows(self.seeds),
            temperatures=rows(self.temperatures),
            top_ks=rows(self.top_ks),
            top_ps=rows(self.top_ps),
            min_ps=rows(self.min_ps),
            ban_ids=rows(self.ban_ids),
            ban_until=rows(self.ban_until),
        )

    def select(self, rows: Tensor) -> SamplingTensors:
        """The tensors of `rows` [B] int64 alone, in that order, out of the R rows."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return SamplingTensors(**{name: t[rows] if t.shape[0] else t for name, t in tensors.items()})


@dataclass(frozen=True)
class LogitConstraints:
    """Changes to the target's logits rows that depend on the tokens before each row; ops.process_logits applies them.

    A field that no row of the batch uses has no elements. Draft models ignore constraints: fewer drafts are accepted,
    and the tokens are the same.
    """

    history: Tensor  # [R, L] int32, -1 padded: all tokens before the row's draw, drafts included
    prompt_lens: Tensor  # [R] int64, number of prompt tokens among them
    penalties: Tensor  # [R, 3] fp32: repetition (1 = off), presence, frequency
    bias_ids: Tensor  # [R, n] int32, -1 padded
    bias_values: Tensor  # [R, n] fp32
    allow_mask: Tensor  # [R, ceil(V/32)] int32, bit v % 32 of word v // 32: token v may be drawn


@dataclass(frozen=True)
class SpecMetadata:
    """Description of a batch for speculation. Field names follow TensorRT-LLM's SpecMetadata."""

    spec_dec_mode: SpeculativeDecodingMode
    max_draft_len: int
    request_ids: tuple[int, ...]
    seq_lens: Tensor  # [B] int32, rows of each request in this step
    gather_ids: Tensor  # [R] int64, packed row that each logits row belongs to
    draft_tokens: Tensor  # [G, K] int64, junk past draft_lens; -1 = no draft, which is never accepted (see Carry)
    draft_lens: Tensor  # [B] int32, 0 for contexts
    next_prompt_token: Tensor  # [B] int64, prompt token after a chunk; -1: the request emits (last chunk or generation)
    forced_accept: Tensor  # [B] int32, number of drafts that count as accepted; -1 = off
    sampling: SamplingTensors
    constraints: LogitConstraints | None = None  # None: no request has constraints or wants logprobs
    next_draft_len: int = 0  # drafts that a one-engine step makes for the next step, 0..max_draft_len
    # [G, K] int64, the node that each draft follows, -1 = the last token; parents first; None: a shape that is known
    draft_parents: Tensor | None = None
    is_uniform: bool = False  # every request has K drafts and K + 1 rows, and graphs may rely on it
    is_cuda_graph: bool = False
    is_spec_dec_tree: bool = False
    is_spec_dec_dynamic_tree: bool = False

    @classmethod
    def plain(
        cls, request_ids: Sequence[int], attn: AttnMetadata, sampling: SamplingTensors, next_draft_len: int = 0
    ) -> SpecMetadata:
        """Description of a batch without drafts: every request draws one token, after its last row."""
        B, new = attn.batch_size, attn.kv_lens.new_full
        return cls(
            spec_dec_mode=SpeculativeDecodingMode.NONE,
            max_draft_len=next_draft_len,
            request_ids=tuple(request_ids),
            seq_lens=attn.cu_q_lens[1:] - attn.cu_q_lens[:-1],
            gather_ids=attn.cu_q_lens[1:].long() - 1,
            draft_tokens=new((0, 0), 0, dtype=torch.int64),
            draft_lens=new((B,), 0),
            next_prompt_token=new((B,), -1, dtype=torch.int64),
            forced_accept=new((B,), -1),
            sampling=sampling,
            next_draft_len=next_draft_len,
            is_uniform=attn.width == 1,
        )

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_generations(self) -> int:
        """G, the number of generations."""
        return self.draft_tokens.shape[0]

    @property
    def num_contexts(self) -> int:
        """C, the number of contexts."""
        return self.batch_size - self.num_generations

    @property
    def runtime_draft_len(self) -> int:
        """K of this step, 0..max_draft_len."""
        return self.draft_tokens.shape[1]

    @property
    def max_total_draft_tokens(self) -> int:
        """Draft tokens of one request over all branches. A chain has one branch."""
        return self.max_draft_len

    @property
    def num_extra_kv_tokens(self) -> int:
        """Number of KV rows that draft passes may write after the K + 1 rows of the step itself: K - 1."""
        return max(self.max_draft_len - 1, 0)

    def logits_rows(self) -> Tensor:
        """Logits rows of each request, [B, K+1] int64. Past its drafts, the last one is repeated."""
        column = torch.arange(self.runtime_draft_len + 1, device=self.draft_lens.device)
        if self.is_uniform:
            return torch.arange(self.batch_size, device=column.device)[:, None] * len(column) + column
        back = (self.draft_lens[:, None] - column).clamp(min=0)  # [B, K+1], before the request's last one
        return (self.draft_lens + 1).cumsum(0, dtype=torch.int32)[:, None].long() - 1 - back

    def per_request(self, rows: Tensor) -> Tensor:
        """Arrange values of logits rows, [R], by request: [B, K+1]."""
        return rows[self.logits_rows()]

    def row_owners(self) -> Tensor:
        """Request of each logits row, [R] int64: the inverse of `logits_rows`."""
        return row_requests(F.pad((self.draft_lens + 1).cumsum(0), (1, 0)), self.gather_ids.shape[0])

    def drafts_per_request(self) -> Tensor:
        """Draft tokens of every request, [B, K] int64; -1 for contexts."""
        return self._with_contexts(self.draft_tokens)

    def parents_per_request(self) -> Tensor:
        """draft_parents of every request, [B, K] int64; -1 for contexts."""
        assert self.draft_parents is not None
        return self._with_contexts(self.draft_parents)

    def _with_contexts(self, values: Tensor) -> Tensor:
        """Values [G, K] of generations as [B, K], -1 for contexts."""
        if self.runtime_draft_len == 0:
            return values.new_empty(self.batch_size, 0)
        # One graph serves any C and G. So no tensor of C rows is built, and a row of -1 can always be read.
        generation = torch.arange(self.batch_size, device=self.seq_lens.device) - self.num_contexts
        rows = F.pad(values, (0, 0, 1, 0), value=-1)  # [1 + G, K]
        return rows[(generation + 1).clamp(min=0)]


@dataclass(frozen=True)
class StepInputs:
    """Everything that one launch needs."""

    input_ids: Tensor  # [T] int64
    attn: AttnMetadata
    spec: SpecMetadata
    hidden_states: Tensor | None = None  # [T, n * H], the target's states, for draft layers next to the target


@dataclass(frozen=True)
class Proposal:
    """Drafts for the next step.

    B is the number of requests of the launch in a one-engine step, and of the requests that want drafts in a drafter.
    """

    draft_tokens: Tensor  # [B, K] int64, target vocabulary; junk past draft_lens
    draft_lens: Tensor  # [B] int32, 0..K
    draft_probs: Tensor | None = None  # [B, K, V] fp32
    draft_kv_lens: Tensor | None = None  # [B] int32, valid draft KV rows if all drafts are accepted; None = no draft KV
    # [B, K] int64, the draft that each draft follows, -1 = the last token; parents first. None: chains, or a known tree
    draft_parents: Tensor | None = None
    # [B, K] fp32, the probability that the drafter gives each draft after those before it, without temperature; of a
    # confidence head its guess. They help to choose how many drafts are verified (engine/draft_length.py), and change
    # no token. None = not known
    draft_scores: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """Tokens that a step adds to each sequence."""

    tokens: Tensor  # [B, K+1] int64, -1 past num_tokens
    num_tokens: Tensor  # [B] int64: 0 for a context chunk that is not the last, else 1..K+1
    path: Tensor | None = None  # [B, K+1] int64, row of the request that drew each token, -1 past them; None: no tree


@dataclass(frozen=True)
class StepOutputs:
    """Outputs of one launch. A one-engine step also fills verdict, proposal, next_new_tokens and next_kv_lens."""

    tokens: Tensor  # [R] int64, the model's own draw at each logits row
    verdict: Verdict | None = None
    proposal: Proposal | None = None  # one row per request; junk where the verdict has no tokens
    # [B, K'+1] int64, last token and drafts, which are the next step's inputs; -1 past the proposal's draft_lens
    next_new_tokens: Tensor | None = None
    next_kv_lens: Tensor | None = None  # [B] int32, tokens whose KV is kept
    # [T, n * H] of n captured streams, or [T, n * H + H] with the last states too (SAVE_HIDDEN_STATES). Hidden states
    # stay on the device that computed them, here and in StepInputs and DraftRequest. No other values of a step do.
    hidden_states: Tensor | None = None
    logits: Tensor | None = None  # [R, V] fp32 of lm_head; where a copy costs time, only if the batch has constraints
