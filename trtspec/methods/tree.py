"""Draft trees inside a step: the places of their nodes, and the path that the target agrees with.

After acceptance a step with trees goes on like one with chains: `in_line` puts the rows of the accepted paths in line.
So draft layers read them in order, and their KV is never moved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.config.tree import DraftTree, DynamicTree, Tree
from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs, Verdict
from trtspec.methods.tree_drafts import Children, Drafts, Pass, draft_tree, grow_tree


class Shape(NamedTuple):
    """The nodes of each request's tree; b is B, or 1 if all requests have the same tree.

    paths: the nodes from the root's child to each row's own, -1 past it; row 0 is the root's, which has none.
    """

    paths: Tensor  # [b, K+1, depth] int32
    depths: Tensor  # [b, K+1] int64, of each row


class TreeTables(nn.Module, ABC):
    """Draft trees as tensors of a step, and the places of their nodes in a batch."""

    tree: Tree
    is_dynamic: ClassVar[bool] = False  # the step chooses the shape of each request's tree

    @staticmethod
    def of(tree: Tree, device: torch.device | None = None) -> TreeTables:
        """Return the tables of a tree."""
        return StaticTables(tree, device) if isinstance(tree, DraftTree) else DynamicTables(tree)

    @abstractmethod
    def shape(self, spec: SpecMetadata) -> Shape:
        """Return the trees that the step verifies."""

    @abstractmethod
    def parents_of(self, spec: SpecMetadata) -> Tensor:
        """Return the parent of each node, [b, K] int64, -1 = the root; b as in Shape."""

    @property
    @abstractmethod
    def most_inner(self) -> int:
        """Largest number of nodes of one depth that have children; the root is one."""

    @property
    @abstractmethod
    def most_children(self) -> int:
        """Largest number of children of a node."""

    @abstractmethod
    def depth_within(self, count: int) -> int:
        """Largest depth of the first `count` nodes."""

    @abstractmethod
    def draft(
        self,
        hidden: Tensor,
        attn: AttnMetadata,
        sampling: SamplingTensors,
        run: Pass | None,
        children: Children,
        count: int,
    ) -> Drafts:
        """Return the first `count` drafts of a tree for each request.

        hidden: [B, H], the output at the last row that each request keeps. attn: its rows, with the KV lengths that are
        kept. sampling: [B] rows, how to sample the root's children. run: None = no pass reads drafts, so all nodes of a
        depth have the same children. Else nodes that have children write one KV row each, from the kept length on.
        """

    def placed(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs with the nodes of a tree where they have the drafts of a chain, K of them."""
        attn, spec = inputs.attn, inputs.spec
        K, T = spec.runtime_draft_len, inputs.input_ids.shape[0]
        if K == 0 or (not torch.compiler.is_compiling() and spec.num_generations == 0):  # a graph takes any number
            return inputs
        paths, depths = self.shape(spec)
        paths = paths.expand(attn.batch_size, -1, -1)
        shifts = (depths - torch.arange(K + 1, device=depths.device)).expand(attn.batch_size, -1)  # depth less place
        if spec.is_uniform:
            ancestors, shift = paths.flatten(0, 1), shifts.flatten()
        else:
            ancestors = _of_rows(paths, attn, spec.num_contexts, T)
            ends = (spec.draft_lens + 1).cumsum(0)  # [B]
            owners = spec.row_owners()  # [R]
            column = torch.arange(owners.shape[0], device=owners.device) - (ends - spec.draft_lens - 1)[owners]
            shift = shifts[owners, column.clamp(max=K)]
        sampling = replace(spec.sampling, positions=spec.sampling.positions + shift)
        return replace(self.with_ancestors(inputs, ancestors), spec=replace(spec, sampling=sampling))

    @staticmethod
    def with_ancestors(inputs: StepInputs, ancestors: Tensor) -> StepInputs:
        """Return the inputs with the nodes of a tree in place for layers alone. Rows still draw for those of a chain.

        ancestors: see AttnMetadata.
        """
        attn = inputs.attn
        return replace(inputs, attn=replace(attn, tree_base=attn.kv_lens - inputs.spec.draft_lens, ancestors=ancestors))

    def ancestors(self, inputs: StepInputs) -> Tensor:
        """Return AttnMetadata.ancestors of any ragged batch, also without drafts: [T, depth of the tree] int32."""
        attn, spec, T = inputs.attn, inputs.spec, inputs.input_ids.shape[0]
        if spec.runtime_draft_len == 0:
            return attn.kv_lens.new_full((T, self.tree.depth), -1)
        paths = self.shape(spec).paths
        paths = F.pad(paths, (0, self.tree.depth - paths.shape[2]), value=-1)
        return _of_rows(paths.expand(attn.batch_size, -1, -1), attn, spec.num_contexts, T)

    def accepted(self, sampled: Tensor, spec: SpecMetadata) -> Verdict:
        """Accept strictly along the tree; see `accept_path`. sampled: [R], the target's own draw at each logits row."""
        K, emits = spec.runtime_draft_len, spec.next_prompt_token < 0
        own, drafts, parents = spec.per_request(sampled), spec.drafts_per_request(), self.parents_of(spec)
        return accept_path(own, drafts, parents, spec.draft_lens, spec.forced_accept, emits, self.depth_within(K))


class StaticTables(TreeTables):
    """A tree that all requests have.

    paths: [N+1, depth] int32 and depths: [N+1] int64 are those of Shape. parents: [N] int64, -1 = the root. inner_<d>:
    [n, depth] int32, paths of the n nodes of depth d that have children, in places among all nodes that have children.
    """

    tree: DraftTree
    paths: Tensor
    depths: Tensor
    parents: Tensor

    def __init__(self, tree: DraftTree, device: torch.device | None = None) -> None:
        super().__init__()
        self.tree = tree

        def padded(paths: Sequence[Sequence[int]]) -> Tensor:
            rows = [[*path, *[-1] * (tree.depth - len(path))] for path in paths]
            return torch.tensor(rows, dtype=torch.int32, device=device)

        place = {node: i for i, node in enumerate(tree.inner)}  # of its KV row in draft passes
        tables = {
            "paths": padded([tree.path(node) for node in range(-1, len(tree.paths))]),
            "depths": torch.tensor([0, *tree.depths], device=device),
            "parents": torch.tensor(tree.parents, device=device),
        }
        for depth in range(1, tree.depth):
            nodes = [node for node in tree.inner if tree.depths[node] == depth]
            tables[f"inner_{depth}"] = padded([[place[one] for one in tree.path(node)] for node in nodes])
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def shape(self, spec: SpecMetadata) -> Shape:
        K = spec.runtime_draft_len
        return Shape(self.paths[None, : K + 1], self.depths[None, : K + 1])

    def parents_of(self, spec: SpecMetadata) -> Tensor:
        return self.parents[None, : spec.runtime_draft_len]

    @property
    def most_inner(self) -> int:
        counts = Counter(self.tree.depths[node] for node in self.tree.inner)
        return max([1, *counts.values()])

    def inner(self, depth: int) -> Tensor:
        """Paths of the nodes of this depth that have children; see the class."""
        return cast("Tensor", getattr(self, f"inner_{depth}"))

    @property
    def most_children(self) -> int:
        return 1 + max(path[-1] for path in self.tree.paths)

    def depth_within(self, count: int) -> int:
        return self.tree.depths[count - 1] if count else 0

    def draft(
        self,
        hidden: Tensor,
        attn: AttnMetadata,
        sampling: SamplingTensors,
        run: Pass | None,
        children: Children,
        count: int,
    ) -> Drafts:
        inner = [None if depth == 0 else self.inner(depth) for depth in range(self.depth_within(count))]
        return draft_tree(self.tree, inner, hidden, attn, sampling, run, children)[:, :count], None, None


class DynamicTables(TreeTables):
    """Trees whose shapes are inputs of each step (SpecMetadata.draft_parents)."""

    tree: DynamicTree
    is_dynamic: ClassVar[bool] = True

    def __init__(self, tree: DynamicTree) -> None:
        super().__init__()
        self.tree = tree

    def shape(self, spec: SpecMetadata) -> Shape:
        parents = self.parents_of(spec)  # [B, K]
        B, K = parents.shape
        node = torch.arange(-1, K, device=parents.device).expand(B, -1)  # [B, K+1]
        upwards = [node]  # of each row: its node, the parent of it, ...; -1 = the root, and what would be past it
        for _ in range(self.depth_within(K) - 1):
            above = parents.gather(1, upwards[-1].clamp(min=0))
            upwards.append(torch.where(upwards[-1] >= 0, above, -1))
        lines = torch.stack(upwards, 2)  # [B, K+1, depth]
        depths = (lines >= 0).sum(2)
        place = depths[:, :, None] - 1 - torch.arange(lines.shape[2], device=lines.device)  # in reverse order
        paths = torch.where(place >= 0, lines.gather(2, place.clamp(min=0)), -1)
        return Shape(paths.int(), depths)

    def parents_of(self, spec: SpecMetadata) -> Tensor:
        return spec.parents_per_request()

    @property
    def most_inner(self) -> int:
        return max(1, self.tree.top_k)

    @property
    def most_children(self) -> int:
        return self.tree.top_k

    def depth_within(self, count: int) -> int:
        return min(self.tree.depth, count)

    def draft(
        self,
        hidden: Tensor,
        attn: AttnMetadata,
        sampling: SamplingTensors,
        run: Pass | None,
        children: Children,
        count: int,
    ) -> Drafts:
        return grow_tree(self.tree.top_k, self.tree.depth_of(count), count, hidden, attn, sampling, run, children)


def _of_rows(paths: Tensor, attn: AttnMetadata, num_contexts: int, num_rows: int) -> Tensor:
    """Return the path of each packed row's node, [T, depth] int32; -1 in rows of contexts. paths: [B, K+1, depth]."""
    request = attn.requests(num_rows)  # [T]
    node = torch.arange(num_rows, device=request.device) - attn.cu_q_lens.long()[request]  # [T] row of its request
    rows = paths[request, node.clamp(max=paths.shape[1] - 1)]
    return torch.where((request >= num_contexts)[:, None], rows, -1)


def accept_path(
    sampled: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    draft_lens: Tensor,
    forced_accept: Tensor,
    emits: Tensor,
    depth: int,
) -> Verdict:
    """Strict acceptance along a tree: at each node, go on to the child that has the target's own draw.

    Of equal siblings the first one counts. A chain gets the tokens of ops.spec_accept.

    sampled: [B, K+1] int64, the target's draw at each row: the last token, then the K nodes, parents first.
    draft_tokens: [B, K] int64, the nodes. parents: [b, K] int64, -1 = child of the last token; b is B or 1.
    draft_lens: [B] int32, number of real nodes. forced_accept: [B] int32, -1 = off, else that many first children count
    as agreed. emits: [B] bool, False gives 0 tokens. depth: of the deepest node.
    """
    K = draft_tokens.shape[1]
    offered = torch.arange(K, device=sampled.device) < draft_lens[:, None]  # [B, K]
    row = sampled.new_zeros(sampled.shape[0])  # [B]
    alive, path = emits, [torch.where(emits, row, -1)]
    for step in range(depth):
        child = (parents + 1 == row[:, None]) & offered
        agrees = child & (draft_tokens == sampled.gather(1, row[:, None]))
        forced = (forced_accept >= 0)[:, None]
        taken = (forced & child & (step < forced_accept)[:, None]) | (~forced & agrees)
        alive = alive & taken.any(1)
        row = torch.where(alive, taken.int().argmax(1) + 1, row)
        path.append(torch.where(alive, row, -1))
    rows = F.pad(torch.stack(path, 1), (0, K - depth), value=-1)  # [B, K+1]
    tokens = torch.where(rows >= 0, sampled.gather(1, rows.clamp(min=0)), -1)
    return Verdict(tokens, (rows >= 0).sum(1), rows)


def in_line(inputs: StepInputs, captured: Tensor, path: Tensor) -> tuple[StepInputs, Tensor]:
    """Return the step as if it had verified the accepted paths as chains, and the states [T', n * Ht] of its rows.

    Rows past a path are junk, like rows of rejected drafts. In a uniform batch every request keeps as many rows as the
    longest path could have. Else it keeps all of its rows, so that their number need not be known on the host.

    captured: [T, n * Ht]. path: [B, L] int64, see Verdict; L - 1 is the depth of the tree.
    """
    attn, spec = inputs.attn, inputs.spec
    K, L = spec.runtime_draft_len, path.shape[1]
    kept = path.clamp(min=0)  # [B, L]
    lines = replace(attn, tree_base=None, ancestors=None)
    if spec.is_uniform:
        first = torch.arange(attn.batch_size, device=path.device)[:, None] * (K + 1)
        draws = rows = (first + kept).flatten()  # [B * L]
        seq_lens = torch.full_like(spec.seq_lens, L)
        starts = torch.arange(attn.batch_size + 1, dtype=torch.int32, device=path.device) * L
        lines = replace(lines, cu_q_lens=starts, kv_lens=attn.kv_lens - (K + 1 - L), width=L)
        spec = replace(
            spec,
            seq_lens=seq_lens,
            gather_ids=torch.arange(rows.shape[0], device=path.device),
            draft_tokens=spec.draft_tokens.new_zeros(attn.batch_size, L - 1),
            draft_lens=torch.full_like(spec.draft_lens, L - 1),
        )
    else:
        rows = _in_line(attn.cu_q_lens.long()[:-1], attn.requests(inputs.input_ids.shape[0]), kept, spec.num_contexts)
        owners = spec.row_owners()  # [R]
        draws = _in_line((spec.draft_lens + 1).cumsum(0) - spec.draft_lens - 1, owners, kept, spec.num_contexts)
    spec = replace(spec, sampling=spec.sampling.select(draws), constraints=None)
    return StepInputs(inputs.input_ids[rows], lines, spec), captured[rows]


def _in_line(starts: Tensor, owners: Tensor, kept: Tensor, num_contexts: int) -> Tensor:
    """Rows in which the accepted path of each generation comes first, [T] int64; others stay where they are.

    starts: [B], first row of each request. owners: [T], request of each row. kept: [B, L], rows of the paths.
    """
    place = torch.arange(owners.shape[0], device=owners.device)
    column = place - starts[owners]
    moved = starts[owners] + kept[owners, column.clamp(max=kept.shape[1] - 1)]
    return torch.where((owners >= num_contexts) & (column < kept.shape[1]), moved, place)
