"""speculative_token_tree: a set of paths, each a tuple of child numbers from the root."""

from __future__ import annotations

import ast

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
