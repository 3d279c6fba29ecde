"""speculative_token_tree: a set of paths, each a tuple of child numbers from the root."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from trtspec.errors import ConfigError


def chain(k: int) -> tuple[tuple[int, ...], ...]:
    """The tree that is a chain of k tokens: ((0,), (0, 0), ...)."""
    return tuple((0,) * depth for depth in range(1, k + 1))


def parse_tree(text: str) -> tuple[tuple[int, ...], ...]:
    """Paths of a text such as "[(0,), (0, 0)]", sorted by (length, path). Raises ConfigError unless it is a tree."""
    remedy = "use a list of paths whose parents are listed too, such as '[(0,), (1,), (0, 0)]'"
    try:
        paths = [tuple(path) for path in ast.literal_eval(text)]
        known = {(), *paths}  # TypeError if a path contains a list
    except (ValueError, SyntaxError, TypeError):
        raise ConfigError(f"speculative_token_tree={text!r} cannot be read; {remedy}") from None
    legal = all(path and path[:-1] in known and all(type(i) is int and i >= 0 for i in path) for path in paths)
    if not paths or not legal or len(set(paths)) < len(paths):
        raise ConfigError(f"speculative_token_tree={text!r} is not a tree; {remedy}")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


@dataclass(frozen=True)
class DraftTree:
    """The shape of a draft tree of N nodes. The root, the last token of the sequence, is not a node.

    paths: as parse_tree returns them, so that parents come first, and the nodes up to any depth. The last number of a
    path is the rank of the node among the likeliest children of its parent.
    """

    is_dynamic: ClassVar[bool] = False

    paths: tuple[tuple[int, ...], ...]

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node, -1 = the root."""
        number = {path: i for i, path in enumerate(self.paths)}
        return tuple(number.get(path[:-1], -1) for path in self.paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root's children have depth 1."""
        return tuple(map(len, self.paths))

    @property
    def depth(self) -> int:
        """Depth of the deepest node: K."""
        return self.depths[-1]

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Nodes that have children."""
        return tuple(sorted({parent for parent in self.parents if parent >= 0}))

    @property
    def num_nodes(self) -> int:
        """Number of nodes: N."""
        return len(self.paths)

    @property
    def draft_rows(self) -> int:
        """Number of KV rows that one drafting writes: those of nodes that have children. P."""
        return len(self.inner)

    @property
    def branch_rows(self) -> int:
        """Most nodes within a depth d, less d: N - K, as each further depth has a node."""
        return self.num_nodes - self.depth

    def parents_for(self, own: Sequence[int]) -> Sequence[int]:
        """Parents of a request's drafts, whose own shape would be `own`: those of the tree."""
        return self.parents

    def within(self, depth: int) -> int:
        """Number of nodes of at most this depth; they come first."""
        return sum(one <= depth for one in self.depths)

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child to `node`; none for the root, -1."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]


@dataclass(frozen=True)
class DynamicTree:
    """Limits of draft trees whose shape each step chooses for each request.

    A tree has at most `num_nodes` nodes (N) and the depth `depth` (K). Its nodes are in an order in which parents come
    first, the most likely ones early. top_k: number of nodes of each depth of which a model guesses children, and of
    children of each; 0 = a drafter on the host makes the trees.
    """

    is_dynamic: ClassVar[bool] = True

    depth: int
    num_nodes: int
    top_k: int = 0

    @property
    def draft_rows(self) -> int:
        """Number of KV rows that one drafting writes: `top_k` for each depth but the last."""
        return self.top_k * (self.depth - 1)

    @property
    def branch_rows(self) -> int:
        """Most nodes within a depth d, less d: N - 1, as all nodes may be at depth 1."""
        return self.num_nodes - 1

    def parents_for(self, own: Sequence[int]) -> Sequence[int]:
        """Parents of a request's drafts: `own`, the shape that its step chose."""
        return own

    def within(self, depth: int) -> int:
        """Largest number of nodes of a tree of this depth.

        A model's tree leaves one node for each further depth. So each depth has a number of its own, and graphs of that
        many nodes make passes for that depth only.
        """
        if depth <= 0:
            return 0
        if not self.top_k:
            return self.num_nodes
        return min(self.top_k + (depth - 1) * self.top_k**2, self.num_nodes - max(self.depth - depth, 0))

    def depth_of(self, num_nodes: int) -> int:
        """Depth of the trees that a step makes if it is to make `num_nodes` nodes, at most N."""
        depths = range(self.depth + 1) if self.top_k else (0, self.depth)
        return next(depth for depth in depths if self.within(depth) >= num_nodes)


Tree = DraftTree | DynamicTree


def tree_of(data: Mapping[str, Any]) -> Tree:
    """Return the tree whose fields, as plain data, are `data`. KeyError or TypeError if they are those of no tree."""
    if "paths" in data:
        return DraftTree(tuple(map(tuple, data["paths"])))
    return DynamicTree(**data)


def depth_of(parents: Sequence[int] | None) -> int | None:
    """Depth of a tree's deepest node, 0 without nodes. parents: as in node_depths; None, a chain, gives None."""
    return None if parents is None else max(node_depths(parents), default=0)


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, 1 for children of the root. parents: the node before each node, -1 = the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
