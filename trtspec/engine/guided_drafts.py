"""Fits the drafts of a guided request to its grammar.

Drafts that break it go, but keep their place in a tree of a fixed shape. Text that it forces is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtspec.config.tree import Tree
from trtspec.engine.draft_chances import Outcome
from trtspec.engine.request import Request


def follow_grammar(request: Request, tree: Tree | None, most: int, depth: int) -> None:
    """Change the drafts that the request's next step would verify. The request has a guide.

    tree: the engine's; None = chains. most: number of drafts that may be verified. depth: most tokens ahead, for trees.
    """
    guide, old = request.guide, request.drafts
    assert guide is not None
    parents = range(-1, len(old) - 1) if tree is None else tree.parents_for(request.draft_parents)
    allowed = guide.allowed(old, parents)
    if tree is None:
        request.drafts = guide.extend(old[: len(allowed)], most)
    elif tree.is_dynamic:
        request.keep_drafts(allowed)
        _extend_line(request, most, depth)
    elif not allowed:
        _fill_line(request, parents, min(most, depth))
    request.num_own_drafts, request.is_cut = len(allowed), len(allowed) < len(old)
    request.drop_draft_kv(old)


def _extend_line(request: Request, most: int, depth: int) -> None:
    """Let what the grammar forces follow the likeliest line of a tree: that of the first child of each node."""
    assert request.guide is not None
    line = _line(request.draft_parents, len(request.drafts))
    room = min(most - len(request.drafts), depth - len(line))
    told = [request.drafts[node] for node in line]
    forced = request.guide.extend(told, len(line) + max(room, 0))[len(line) :]
    last, count = line[-1] if line else -1, len(request.drafts)
    request.drafts = request.drafts + forced
    request.draft_parents = [*request.draft_parents, *[last, *range(count, count + len(forced) - 1)][: len(forced)]]


def _fill_line(request: Request, parents: Sequence[int], depth: int) -> None:
    """Put forced text on the first child of the root, its first child, and so on. The tree has no allowed drafts.

    parents: the draft before each node, -1 = the last token. Other nodes stay where they are. If there are no drafts,
    or nothing is forced, nothing is drafted.
    """
    assert request.guide is not None
    drafts = list(request.drafts)
    forced = request.guide.extend([], depth)
    for node, token in zip(_line(parents, len(drafts)), forced, strict=False):
        drafts[node] = token
    request.drafts = drafts if forced else []


def _line(parents: Sequence[int], count: int) -> list[int]:
    """The first child of the root, its first child, and so on, among the first `count` nodes of a tree."""
    line: list[int] = []
    for node in range(count):
        if parents[node] == (line[-1] if line else -1):
            line.append(node)
    return line


def draft_source(request: Request) -> int:
    """Key of what most of the next drafts come from, for DraftLength: id = the drafter, ~id = another source.

    Drafts of guides, and those that replace a model's, are accepted at other rates, so they are counted apart.
    """
    led = request.guide is not None and 2 * request.num_own_drafts < len(request.drafts)
    return ~request.request_id if led or request.looked_up else request.request_id


def outcomes_of(request: Request, verified: int, accepted: int) -> list[Outcome]:
    """Outcomes of a request's drafts in a step, by source. The first forbidden draft counts as rejected."""
    if request.guide is None:
        return [Outcome(draft_source(request), verified, accepted)] if verified else []
    own = min(request.num_own_drafts, verified)
    rejected = request.is_cut and own == request.num_own_drafts
    found = []
    if own or rejected:
        found.append(Outcome(request.request_id, own + rejected, min(accepted, own)))
    if verified > own and accepted >= own:
        found.append(Outcome(~request.request_id, verified - own, accepted - own))
    return found
