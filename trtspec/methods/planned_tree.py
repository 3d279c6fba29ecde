"""The draft tree of a SpeculationPlan: its shape or its limits, and what is refused."""

from __future__ import annotations

from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.config.speculative import SpeculativeConfig
from trtspec.config.tree import DynamicTree, chain, parse_tree
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.modes import SpeculativeDecodingMode


def plan_tree(config: SpeculativeConfig, k: int) -> tuple[tuple[int, ...], ...]:
    """Paths of the tree; those of a chain of K if none is given. ConfigError for a tree of a depth other than k."""
    if config.speculative_token_tree is None:
        return chain(k)
    tree = parse_tree(config.speculative_token_tree)
    depth = len(tree[-1])
    if depth != k:
        kind = "a chain of" if tree == chain(depth) else f"a tree of {len(tree)} nodes and a depth of"
        raise ConfigError(
            f"speculative_token_tree={config.speculative_token_tree!r} is {kind} {depth} tokens but "
            f"num_speculative_tokens={k}; make them equal"
        )
    return tree


def plan_dynamic_tree(config: SpeculativeConfig, k: int, mode: SpeculativeDecodingMode) -> DynamicTree | None:
    """Limits of trees that each step shapes; None if there are none. Their top_k is 0 if the host makes the trees.

    ConfigError for limits that contradict K, and if a model makes the trees and dynamic_tree_max_topK is not set.
    """
    nodes, top_k = config.max_total_draft_tokens, config.dynamic_tree_max_topK
    if nodes is None:
        return None
    if nodes < k:
        raise ConfigError(
            f"max_total_draft_tokens={nodes} is less than {k}, the depth of the tree; use at least {k}, or a smaller "
            "num_speculative_tokens"
        )
    if not mode.drafts_trees():
        return DynamicTree(k, nodes)
    if top_k is None:
        raise ConfigError(f"max_total_draft_tokens={nodes} without dynamic_tree_max_topK; set it, to 4 for a start")
    most = top_k + (k - 1) * top_k**2
    if nodes > most:
        raise ConfigError(
            f"max_total_draft_tokens={nodes}: a tree of num_speculative_tokens={k} and dynamic_tree_max_topK={top_k} "
            f"has at most {most} nodes; use at most {most}"
        )
    return DynamicTree(k, nodes, top_k)


def check_tree(config: SpeculativeConfig, spec_plan: SpeculationPlan) -> None:
    """Raise UnsupportedError or ConfigError if the plan's tree does not run with the other settings.

    These are the mode, a threshold, a vocabulary of the draft's own, chosen draft lengths and a pool of matches.
    """
    dynamic = spec_plan.dynamic_tree is not None
    text = (
        f"max_total_draft_tokens={config.max_total_draft_tokens}"
        if dynamic
        else f"speculative_token_tree={config.speculative_token_tree!r}"
    )
    takes = SpeculativeDecodingMode.takes_dynamic_trees if dynamic else SpeculativeDecodingMode.drafts_trees
    if not takes(spec_plan.mode):
        able = ", ".join(mode.name for mode in SpeculativeDecodingMode if takes(mode))
        raise UnsupportedError(
            f"{text} asks for a draft tree, which mode={spec_plan.mode.name} does not take yet; use one of {able}, "
            "or leave it unset"
        )
    if spec_plan.draft_confidence_threshold is not None:
        raise UnsupportedError(
            f"draft_confidence_threshold={spec_plan.draft_confidence_threshold} with a draft tree, {text}, is "
            "not built yet; leave one of them unset"
        )
    if config.sa_config is not None:
        raise UnsupportedError(f"sa_config with a draft tree, {text}, is not built yet; leave one of them unset")
    if config.use_heterogeneous_vocab:
        raise UnsupportedError(
            f"use_heterogeneous_vocab=True with a draft tree, {text}, is not built yet; leave the tree unset"
        )
    if dynamic:
        _check_dynamic(config, spec_plan, text)
    elif not set(chain(spec_plan.num_speculative_tokens)) <= set(spec_plan.speculative_token_tree):
        raise ConfigError(
            f"{text} does not contain the likeliest chain of its depth, which is worth more "
            f"than any other node; add {chain(spec_plan.num_speculative_tokens)}"
        )


def _check_dynamic(config: SpeculativeConfig, spec_plan: SpeculationPlan, text: str) -> None:
    if config.is_public_pool is not None:
        raise UnsupportedError(f"is_public_pool={config.is_public_pool} with {text} is not built yet; leave one unset")
    if spec_plan.chooses_draft_len:
        raise UnsupportedError(
            f"{config.choosing_settings} with {text} is not built yet; {config.fixing_advice}, or leave the tree unset"
        )
    if config.dynamic_tree_max_topK is not None and not spec_plan.mode.drafts_trees():
        raise ConfigError(
            f"dynamic_tree_max_topK={config.dynamic_tree_max_topK} means nothing to method={spec_plan.method!r}, which "
            "finds its trees on the host; remove it"
        )
