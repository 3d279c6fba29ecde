"""Options of suffix decoding: depth and size of the tree, and bounds of a draft."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.methods.options import MethodOptions


@dataclass(frozen=True, kw_only=True)
class SuffixOptions(MethodOptions):
    """Options of the method "suffix".

    suffix_decoding_max_tree_depth: in tokens. suffix_decoding_max_cached_requests: number of responses that are kept.
    suffix_decoding_max_spec_factor: bound of a draft's length, as a multiple of the match's.
    suffix_decoding_min_token_prob: bound of the probability of a draft's last token.
    """

    suffix_decoding_max_tree_depth: int
    suffix_decoding_max_cached_requests: int
    suffix_decoding_max_spec_factor: float
    suffix_decoding_min_token_prob: float
