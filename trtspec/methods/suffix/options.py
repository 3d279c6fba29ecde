"""How far suffix trees look, and what they keep."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.methods.options import MethodOptions


@dataclass(frozen=True, kw_only=True)
class SuffixOptions(MethodOptions):
    """suffix_decoding_max_tree_depth: tokens. suffix_decoding_max_cached_requests: responses kept. The other two bound
    a draft: its length as a multiple of the match's, and the probability of its last token."""

    suffix_decoding_max_tree_depth: int
    suffix_decoding_max_cached_requests: int
    suffix_decoding_max_spec_factor: float
    suffix_decoding_min_token_prob: float
