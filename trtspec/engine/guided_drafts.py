"""Fits the drafts of a guided request to its grammar: those that break it go, and what it forces is drafted."""

from __future__ import annotations

from trtspec.config.tree import DraftTree, Tree
from trtspec.engine.request import Request


def follow_grammar(request: Request, tree: Tree | None, most: int, depth: int) -> None:
    """Change the drafts of a request with a guide, which its next step would verify.

    tree: the engine's; None = chains. most: number of drafts that may be verified. depth: how many tokens ahead.
    """
    guide, old = request.guide, request.drafts
    assert guide is not None
    if tree is None:
        request.drafts = guide.draft(old, most)
        request.is_grammar_led = request.drafts[:1] != old[:1]
    else:
        allowed = guide.allowed(old, tree.parents_for(request.draft_parents))
        request.is_grammar_led = not allowed
        if not allowed:
            _draft_chain(request, tree, guide.next_tokens(min(most, depth)))
        elif tree.is_dynamic:
            request.keep_drafts(allowed)
    same = next((j for j, pair in enumerate(zip(old, request.drafts, strict=False)) if pair[0] != pair[1]), len(old))
    # the draft KV of drafts that others replace is not that of the text
    request.kv.draft_kv_len = min(request.kv.draft_kv_len, len(request.tokens) + same)


def _draft_chain(request: Request, tree: Tree, tokens: list[int]) -> None:
    """Draft a chain. In a tree of a fixed shape it takes the first child of each node, and other nodes stay."""
    if isinstance(tree, DraftTree):
        drafts = list(request.drafts)
        for depth, token in enumerate(tokens, 1):
            node = tree.paths.index((0,) * depth) if (0,) * depth in tree.paths else len(drafts)
            if node < len(drafts):
                drafts[node] = token
        request.drafts = drafts
    else:
        request.drafts, request.draft_parents = tokens, range(-1, len(tokens) - 1)


def draft_source(request: Request) -> int:
    """Key of what the next drafts come from, for DraftLength: its guide's are expected to do otherwise than others."""
    return ~request.request_id if request.is_grammar_led else request.request_id
