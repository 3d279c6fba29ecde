"""Draft trees inside a step: the path that the target agrees with, and the drafts of the next tree.

After acceptance a step with trees goes on like one with chains: `in_line` selects the rows of the accepted paths. So
draft layers read them in order, and their KV is never moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.config.tree import DraftTree
from trtspec.core import AttnMetadata, SamplingTensors, StepInputs, Verdict


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

    sampled: [B, N+1] int64, the target's draw at each row: the last token, then the nodes. draft_tokens, parents:
    [B, N] int64, the nodes, parents first; -1 = child of the last token. draft_lens: [B] int32, number of real nodes.
    forced_accept: [B] int32, -1 = off, else that many first children count as agreed. emits: [B] bool, False gives 0
    tokens. depth: K, of the deepest node.
    """
    node = torch.arange(draft_tokens.shape[1], device=sampled.device)
    offered = node < draft_lens[:, None]  # [B, N]
    row = sampled.new_zeros(sampled.shape[0])  # [B]
    alive, path = emits, [torch.where(emits, row, -1)]
    for step in range(depth):
        child = (parents + 1 == row[:, None]) & offered
        agrees = child & (draft_tokens == sampled.gather(1, row[:, None]))
        taken = torch.where((forced_accept >= 0)[:, None], child & (step < forced_accept)[:, None], agrees)
        alive = alive & taken.any(1)
        row = torch.where(alive, taken.int().argmax(1) + 1, row)
        path.append(torch.where(alive, row, -1))
    rows = torch.stack(path, 1)  # [B, K+1]
    tokens = torch.where(rows >= 0, sampled.gather(1, rows.clamp(min=0)), -1)
    return Verdict(tokens, (rows >= 0).sum(1), rows)


def in_line(inputs: StepInputs, captured: Tensor, path: Tensor) -> tuple[StepInputs, Tensor]:
    """Return the step as if it had verified the accepted paths as chains, and the states [T', n * Ht] of its rows.

    Every generation gets K + 1 rows. Those past its path are junk, like rows of rejected drafts. captured: [T, n * Ht].
    path: [B, K+1] int64, see Verdict.
    """
    attn, spec = inputs.attn, inputs.spec
    C, G, K = spec.num_contexts, spec.num_generations, path.shape[1] - 1
    kept = path[C:].clamp(min=0)  # [G, K+1]
    starts = attn.cu_q_lens.long()
    contexts = torch.arange(int(starts[C]), device=path.device)
    rows = torch.cat((contexts, (starts[C:-1, None] + kept).flatten()))  # [T']
    logits_rows = spec.logits_rows()
    draws = torch.cat((logits_rows[:C, 0], logits_rows[C:].gather(1, kept).flatten()))  # [R']
    generation = torch.arange(C + G, device=path.device) >= C
    seq_lens = torch.where(generation, K + 1, spec.seq_lens)
    lines = replace(
        attn,
        cu_q_lens=F.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        kv_lens=torch.where(generation, attn.kv_lens - spec.seq_lens + K + 1, attn.kv_lens),
        width=0,
        tree_base=None,
        ancestors=None,
    )
    spec = replace(
        spec,
        seq_lens=seq_lens,
        gather_ids=spec.gather_ids[draws],
        draft_tokens=spec.draft_tokens.new_zeros(G, K),
        draft_lens=torch.where(generation, K, 0).int(),
        sampling=spec.sampling.select(draws),
        constraints=None,
        is_uniform=False,
        draft_parents=None,
    )
    return StepInputs(inputs.input_ids[rows], lines, spec), captured[rows]


@dataclass(frozen=True)
class Level:
    """Nodes of one depth that are run in a draft pass: those with children."""

    tokens: Tensor  # [B * n] int64
    hidden: Tensor  # [B * n, H], the output of each node's parent
    attn: AttnMetadata  # n rows per request
    sampling: SamplingTensors  # [B * n] rows: how to sample the children


Pass = Callable[[int, Level], Tensor]
"""(pass number 1..K-1, its nodes) -> their outputs [B * n, H]."""
Children = Callable[[int, Tensor, SamplingTensors, int], Tensor]
"""(pass number, outputs [R, H], how to sample, count) -> the likeliest children of each row, [R, count] int64."""


def draft_tree(
    tree: DraftTree,
    hidden: Tensor,
    attn: AttnMetadata,
    sampling: SamplingTensors,
    run: Pass | None,
    children: Children,
) -> Tensor:
    """Return the drafts of a tree for each request, [B, N] int64.

    hidden: [B, H], the output at the last row that each request keeps. attn: its rows, with the KV lengths that are
    kept. sampling: [B] rows, how to sample the root's children. run: None = no pass reads drafts, so all nodes of a
    depth are the same guesses. Else nodes that have children write one KV row each, from the kept length on, in the
    order of the tree.
    """
    B, device = attn.batch_size, attn.kv_lens.device
    place = {node: i for i, node in enumerate(tree.inner)}  # of its KV row, counted from the kept length
    drafts: dict[int, Tensor] = {}  # node -> [B]
    outputs = {-1: hidden}  # node -> [B, H]
    ends = 0
    for depth in range(1, tree.depth + 1):
        nodes = [node for node, one in enumerate(tree.depths) if one == depth]
        parents = sorted({tree.parents[node] for node in nodes})
        if run is None:
            parents, outputs = parents[:1], {parents[0]: hidden}
        elif depth > 1:
            ends += len(parents)
            entries = torch.tensor([[place[one] for one in tree.path(node)] for node in parents], dtype=torch.int32)
            rows = replace(
                attn,
                cu_q_lens=torch.arange(B + 1, dtype=torch.int32, device=device) * len(parents),
                kv_lens=attn.kv_lens + ends,
                tree_mask=attn.tree_mask.new_empty(0),
                width=len(parents),
                tree_base=attn.kv_lens,
                ancestors=entries.to(device).repeat(B, 1),
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
        found = children(depth - 1, states, _repeated(sampling, len(parents)), count).view(B, len(parents), count)
        for node in nodes:
            parent = 0 if run is None else parents.index(tree.parents[node])
            drafts[node] = found[:, parent, tree.paths[node][-1]]
        sampling = sampling.advance()
    return torch.stack([drafts[node] for node in range(len(tree.paths))], 1)


def _repeated(sampling: SamplingTensors, count: int) -> SamplingTensors:
    """Every row `count` times."""
    if count == 1:
        return sampling
    rows = sampling.greedy.shape[0]
    return sampling.select(torch.arange(rows, device=sampling.greedy.device).repeat_interleave(count))
