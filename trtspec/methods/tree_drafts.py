"""The drafts of a tree: those of a fixed shape, and of a shape that follows from how likely the guesses are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.config.tree import DraftTree
from trtspec.core import AttnMetadata, SamplingTensors


@dataclass(frozen=True)
class Level:
    """Nodes of one depth that are run in a draft pass: those with children."""

    tokens: Tensor  # [B * n] int64
    hidden: Tensor  # [B * n, H], the output of each node's parent
    attn: AttnMetadata  # n rows per request
    sampling: SamplingTensors  # [B * n] rows: how to sample the children


Pass = Callable[[int, Level], Tensor]
"""(pass number 1..K-1, its nodes) -> their outputs [B * n, H]."""
Children = Callable[[int, Tensor, SamplingTensors, int], tuple[Tensor, Tensor | None]]
"""(pass number, outputs [R, H], how to sample, count) -> the likeliest children of each row.

These are target ids [R, count] int64, best first, and their scores [R, count] fp32: processed logits plus noise, -inf
where the filters leave no further child. A tree of a fixed shape needs no scores: None.
"""
Drafts = tuple[Tensor, Tensor | None, Tensor | None]
"""Drafts [B, N] int64; their parents [B, N] int64 and numbers [B] int64, None where they are known."""


def draft_tree(
    tree: DraftTree,
    inner: Sequence[Tensor | None],
    hidden: Tensor,
    attn: AttnMetadata,
    sampling: SamplingTensors,
    run: Pass | None,
    children: Children,
) -> Tensor:
    """Return the drafts of a tree for each request, down to a depth d, [B, n] int64.

    Nodes write their KV rows in the order of the tree.

    inner: for each depth less than d, the paths [n, K] int32 of its nodes that have children, in places among all such
    nodes; None for depth 0. Other arguments: see methods.tree.TreeTables.draft.
    """
    B, device = attn.batch_size, attn.kv_lens.device
    drafts: dict[int, Tensor] = {}  # node -> [B]
    outputs = {-1: hidden}  # node -> [B, H]
    ends = 0
    for depth in range(1, len(inner) + 1):
        nodes = [node for node, one in enumerate(tree.depths) if one == depth]
        parents = sorted({tree.parents[node] for node in nodes})
        if run is None:
            parents, outputs = parents[:1], {parents[0]: hidden}
        elif depth > 1:
            ends += len(parents)
            rows = replace(
                attn,
                cu_q_lens=torch.arange(B + 1, dtype=torch.int32, device=device) * len(parents),
                kv_lens=attn.kv_lens + ends,
                tree_mask=attn.tree_mask.new_empty(0),
                width=len(parents),
                tree_base=attn.kv_lens,
                ancestors=cast("Tensor", inner[depth - 1]).repeat(B, 1),
            )
            level = Level(
                torch.stack([drafts[node] for node in parents], 1).flatten(),
                torch.stack([outputs[tree.parents[node]] for node in parents], 1).flatten(0, 1),
                rows,
                _repeated(sampling, len(parents)),
            )
            made = run(depth - 1, level).view(B, len(parents), -1)
            outputs = {node: made[:, i] for i, node in enumerate(parents)}
        states = torch.stack([outputs[node] for node in parents], 1).flatten(0, 1)  # [B * n, H]
        count = 1 + max(tree.paths[node][-1] for node in nodes)
        found, _ = children(depth - 1, states, _repeated(sampling, len(parents)), count)
        found = found.view(B, len(parents), count)
        for node in nodes:
            parent = 0 if run is None else parents.index(tree.parents[node])
            drafts[node] = found[:, parent, tree.paths[node][-1]]
        sampling = sampling.advance()
    return torch.stack([drafts[node] for node in range(len(drafts))], 1)


def grow_tree(
    top_k: int,
    depth: int,
    count: int,
    hidden: Tensor,
    attn: AttnMetadata,
    sampling: SamplingTensors,
    run: Pass | None,
    children: Children,
) -> Drafts:
    """Return the `count` nodes of the highest scores, best first, of a tree that grows where guesses are likely.

    The `top_k` best nodes of each depth get `top_k` children each. The score of a node is the log-probability that the
    target draws the path to it, if the target's logits are the draft's. The noise of that draw is known, and so is what
    it adds to each logit. So the probability of a child is the softmax of its score over those of its siblings, and the
    score of a node never exceeds its parent's. Nodes with equal scores are in the order of their depth, then of their
    parents, then of their siblings. A node that the filters leave no token for is -1.

    Other arguments: see methods.tree.TreeTables.draft.
    """
    B, device = attn.batch_size, attn.kv_lens.device
    tokens, scores, parents = list[Tensor](), list[Tensor](), list[Tensor]()  # [B, n] of each depth
    made = 0  # number of nodes before this depth
    beam = scores_of_beam = None  # [B, n] places of the nodes that get children, and their scores
    lines = torch.empty(B, 0, 0, dtype=torch.int32, device=device)  # [B, n, d - 1] KV rows of each one's path
    outputs = hidden[:, None]  # [B, n, H]
    for d in range(1, depth + 1):
        n = outputs.shape[1]
        found, values = children(d - 1, outputs.flatten(0, 1), _repeated(sampling, n), top_k)
        assert values is not None
        own = values - values.logsumexp(1, keepdim=True)  # [B * n, top_k]
        own = torch.where((values > float("-inf")) & (own > float("-inf")), own, float("-inf"))  # of NaN: not above
        own = own.view(B, n, top_k)
        found = found.view(B, n, top_k)
        if beam is None or scores_of_beam is None:
            level_parents = torch.full((B, top_k), -1, device=device)
        else:
            if run is None:  # one row stands for all
                own, found = own.expand(B, beam.shape[1], top_k), found.expand(B, beam.shape[1], top_k)
            own = own + scores_of_beam[:, :, None]
            level_parents = beam[:, :, None].expand(B, beam.shape[1], top_k).flatten(1)
        tokens.append(found.flatten(1))
        scores.append(own.flatten(1))
        parents.append(level_parents)
        if d < depth:
            order = _by_score(scores[-1], top_k)  # [B, n]
            chosen = tokens[-1].gather(1, order)
            above = order // top_k  # [B, n] its parent's place in the beam
            if run is not None:
                last = (d - 1) * top_k + torch.arange(top_k, dtype=torch.int32, device=device)
                before = (
                    lines.gather(1, above[:, :, None].expand(B, top_k, d - 1))
                    if d > 1
                    else lines.new_empty(B, top_k, 0)
                )
                lines = torch.cat((before, last.expand(B, top_k)[:, :, None]), 2)
                rows = replace(
                    attn,
                    cu_q_lens=torch.arange(B + 1, dtype=torch.int32, device=device) * top_k,
                    kv_lens=attn.kv_lens + d * top_k,
                    tree_mask=attn.tree_mask.new_empty(0),
                    width=top_k,
                    tree_base=attn.kv_lens,
                    ancestors=F.pad(lines, (0, depth - d), value=-1).flatten(0, 1),
                )
                read = outputs.gather(1, above[:, :, None].expand(B, top_k, outputs.shape[2])).flatten(0, 1)
                sampling = sampling.advance()
                level = Level(chosen.flatten(), read, rows, _repeated(sampling, top_k))
                outputs = run(d, level).view(B, top_k, -1)
            else:
                sampling = sampling.advance()
            beam, scores_of_beam = made + order, scores[-1].gather(1, order)
        made += tokens[-1].shape[1]
    every = torch.cat(scores, 1)  # [B, M]
    order = _by_score(every, count)  # [B, count]
    place = torch.full_like(every, -1, dtype=torch.int64).scatter(
        1, order, torch.arange(count, device=device).expand(B, -1)
    )
    above = torch.cat(parents, 1).gather(1, order)
    kept = every.gather(1, order) > float("-inf")
    drafts = torch.where(kept, torch.cat(tokens, 1).gather(1, order), -1)
    return drafts, torch.where(above >= 0, place.gather(1, above.clamp(min=0)), -1), kept.sum(1)


def _by_score(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` highest scores of each row, the highest first, [B, count] int64; of equals the first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _repeated(sampling: SamplingTensors, count: int) -> SamplingTensors:
    """Every row `count` times."""
    if count == 1:
        return sampling
    rows = sampling.greedy.shape[0]
    return sampling.select(torch.arange(rows, device=sampling.greedy.device).repeat_interleave(count))
