"""Batches for spec_attention: sequences in a paged cache, the rows of a step, and dense attention as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from trtspec.ops import spec_attention, spec_attention_

NONE = torch.empty(0)
EPSILON = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
dtypes = st.sampled_from(list(EPSILON))


@dataclass(frozen=True)
class Part:
    """Rows [start, start + num_rows) of a sequence, as one request of a batch. Earlier tokens are in the cache."""

    sequence: int
    start: int
    num_rows: int

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True)
class Model:
    """The shape of a layer and its options."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    def random_sequences(self, count: int, length: int, seed: int = 0) -> Sequences:
        """Random q, k and v of every token of `count` sequences."""
        g = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(count, length, heads, self.head_dim, generator=g).to(self.dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return Sequences(self, q, k, v, torch.randn(self.heads, generator=g) if self.sinks else NONE)


@dataclass(frozen=True)
class Sequences:
    """Inputs of the layer for every token: q, k and v, [count, length, heads, D] each, and the sinks."""

    model: Model
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor

    def batch(self, parts: Sequence[Part], tree_mask: Tensor | None = None, poison: float = float("nan")) -> Batch:
        """Arguments of one call. Blocks are assigned in random order, and slots that were not written hold `poison`."""
        m = self.model
        needs = [-(-part.end // m.block_size) for part in parts]
        order = iter((torch.randperm(sum(needs), generator=torch.Generator().manual_seed(len(parts))) + 1).tolist())
        tables = [[next(order) for _ in range(need)] for need in needs]
        columns = max(1, *needs)
        shape = (sum(needs) + 1, m.block_size, m.kv_heads, m.head_dim)
        k_cache, v_cache = torch.full(shape, poison).to(m.dtype), torch.full(shape, poison).to(m.dtype)
        for part, table in zip(parts, tables, strict=True):
            places = torch.arange(part.start)
            slots = torch.tensor(table, dtype=torch.int64)[places // m.block_size], places % m.block_size
            for cache, tokens in ((k_cache, self.k), (v_cache, self.v)):
                cache[slots] = tokens[part.sequence, : part.start]
        q, k, v = (torch.cat([x[p.sequence, p.start : p.end] for p in parts]) for x in (self.q, self.k, self.v))
        return Batch(
            q, k, v, k_cache, v_cache,
            cu_q_lens=torch.tensor([0, *[part.num_rows for part in parts]]).cumsum(0).to(torch.int32),
            kv_lens=torch.tensor([part.end for part in parts], dtype=torch.int32),
            block_tables=torch.tensor([[*t, *[0] * (columns - len(t))] for t in tables], dtype=torch.int32),
            tree_mask=NONE.int() if tree_mask is None else tree_mask,
            sinks=self.sinks, scale=m.head_dim**-0.5, window=m.window, softcap=m.softcap,
        )  # fmt: skip

    def attend(self, parts: Sequence[Part], tree_mask: Tensor | None = None) -> list[Tensor]:
        """Outputs of each part, [num_rows, Hq, D]."""
        out = self.batch(parts, tree_mask).run()
        return list(out.split([part.num_rows for part in parts]))


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, by their names."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cu_q_lens: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    tree_mask: Tensor
    sinks: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    tree_base: Tensor | None = None
    ancestors: Tensor | None = None
    tensors: tuple[Tensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = ("q", "k", "v", "k_cache", "v_cache", "cu_q_lens", "kv_lens", "block_tables", "tree_mask", "sinks")
        object.__setattr__(self, "tensors", tuple(getattr(self, name) for name in names))

    def run(self) -> Tensor:
        """Return the output [T, Hq, D] and change the caches in place."""
        return spec_attention_(*self.tensors, *self.settings)

    def run_functional(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output and new caches."""
        return spec_attention(*self.tensors, *self.settings)

    @property
    def settings(self) -> tuple[object, ...]:
        """The arguments after the sinks."""
        return self.scale, self.window, self.softcap, self.tree_base, self.ancestors


def dense(sequences: Sequences, part: Part, tree_bits: Sequence[Sequence[bool]] | None = None) -> Tensor:
    """Attention of one request's rows in float64, by the textbook formula: [num_rows, Hq, D]."""
    m = sequences.model
    q = sequences.q[part.sequence, part.start : part.end].double()
    k, v = (x[part.sequence, : part.end].double() for x in (sequences.k, sequences.v))
    rows = []
    for i in range(part.num_rows):
        position = part.start + i
        if tree_bits is None:
            seen = list(range(position + 1))
        else:
            seen = [*range(part.start), *(part.start + j for j in range(part.num_rows) if tree_bits[i][j])]
        if m.window:
            seen = [key for key in seen if key > position - m.window]
        keys, values = (x[seen].repeat_interleave(m.heads // m.kv_heads, 1) for x in (k, v))
        scores = (keys * q[i]).sum(-1) * m.head_dim**-0.5  # [keys, Hq]
        if m.softcap:
            scores = m.softcap * torch.tanh(scores / m.softcap)
        if m.sinks:
            scores = torch.cat((scores, sequences.sinks.double()[None]))
        rows.append((scores.softmax(0)[: len(seen), :, None] * values).sum(0))
    return torch.stack(rows) if rows else q.new_empty(0, m.heads, m.head_dim)


def pack_bits(bits: Sequence[Sequence[bool]], words: int) -> Tensor:
    """Pack rows of flags into [rows, words] int32."""
    packed = [
        [sum(flag << j for j, flag in enumerate(row[32 * w : 32 * w + 32])) for w in range(words)] for row in bits
    ]
    return torch.tensor([[x - 2**32 if x >= 2**31 else x for x in row] for row in packed], dtype=torch.int64).int()


@dataclass(frozen=True)
class TreePart:
    """The last token of a sequence and the nodes of a draft tree after it, as one request of a batch.

    The tree's nodes are the sequence's tokens after the last one. parents: the parent of each node, -1 = that token.
    """

    sequence: int
    start: int  # position of the last token, the tree's root
    parents: tuple[int, ...]

    @property
    def part(self) -> Part:
        return Part(self.sequence, self.start, 1 + len(self.parents))

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child to `node`; of -1, the root: none."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    @property
    def ancestors(self) -> list[list[int]]:
        """Entries of spec_attention's `ancestors` for each row."""
        return [self.path(node) for node in range(-1, len(self.parents))]


def tree_batch(sequences: Sequences, parts: Sequence[Part | TreePart], poison: float = float("nan")) -> Batch:
    """Arguments of one call, for requests of which some have trees."""
    batch = sequences.batch([part.part if isinstance(part, TreePart) else part for part in parts], None, poison)
    entries = [e for p in parts for e in (p.ancestors if isinstance(p, TreePart) else [[]] * p.num_rows)]
    depth = max(1, *map(len, entries))
    return replace(
        batch,
        tree_base=torch.tensor([part.start + isinstance(part, TreePart) for part in parts], dtype=torch.int32),
        ancestors=torch.tensor([[*e, *[-1] * (depth - len(e))] for e in entries], dtype=torch.int32),
    )


def chain_of(sequences: Sequences, part: TreePart, node: int) -> Tensor:
    """Output [Hq, D] of a node where the path to it is the end of a sequence, run as plain decoding would."""
    return chain_batch(sequences, part, node).run()[0]


def chain_batch(sequences: Sequences, part: TreePart, node: int) -> Batch:
    """Arguments of a call with a node as the only row, where the path to it is the end of a sequence."""
    tokens = [*range(part.start + 1), *(part.start + 1 + one for one in part.path(node))]
    q, k, v = (x[part.sequence, tokens][None] for x in (sequences.q, sequences.k, sequences.v))
    return Sequences(sequences.model, q, k, v, sequences.sinks).batch([Part(0, len(tokens) - 1, 1)])


@st.composite
def tree_parts(draw: st.DrawFn, most: int = 20) -> TreePart:
    """A tree of up to `most` nodes in any order in which parents come before their children."""
    furthest = draw(st.sampled_from([1, 2, 5, 20]))  # from a node to its parent; 1: a chain
    parents = tuple(draw(st.integers(max(i - furthest, -1), i - 1)) for i in range(draw(st.integers(1, most))))
    return TreePart(draw(st.integers(0, 2)), draw(edges | st.integers(0, 270)), parents)


@st.composite
def models(draw: st.DrawFn) -> Model:
    kv_heads = draw(st.integers(1, 3))
    return Model(
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 2, 6, 8, 16, 20, 64])),
        dtype=draw(dtypes),
        block_size=draw(st.sampled_from([1, 2, 5, 16, 64])),
        window=draw(st.sampled_from([0, 0, 1, 3, 17, 300])),
        softcap=draw(st.sampled_from([0.0, 0.0, 0.5, 30.0])),
        sinks=draw(st.booleans()),
    )


# Lengths that end just before, at and after the edges of blocks and of the tile; arbitrary lengths are added below.
edges = st.sampled_from([0, 1, 15, 16, 17, 255, 256, 257, 270])
parts_of_up_to_40_rows = st.builds(Part, st.integers(0, 2), edges | st.integers(0, 270), st.integers(0, 40))
batches = st.lists(parts_of_up_to_40_rows, min_size=1, max_size=4)
LONGEST = 270 + 40


def assert_near(ours: Tensor, exact: Tensor) -> None:
    assert ours.shape == exact.shape
    torch.testing.assert_close(ours.double(), exact, rtol=EPSILON[ours.dtype], atol=5e-6)
