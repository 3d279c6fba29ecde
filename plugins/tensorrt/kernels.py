"""Which Triton kernel stands behind which AOT plugin, compiled how. Wants Triton."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trtspec_plugins.triton import accept, sample


@dataclass(frozen=True)
class Kernel:
    """A kernel to compile ahead of time: `signature` has the types of its arguments, in Triton's spelling."""

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    options: dict[str, Any] = field(default_factory=lambda: {"enable_fp_fusion": False})  # roundings: see triton/


_SAMPLE = {"logits": "*fp32", "greedy": "*i1", "seeds": "*i64", "positions": "*i64"}
_SAMPLE_REST = {"V": "i32", "num_seeds": "i32", "tokens": "*i64"}

KERNELS: dict[str, Kernel] = {
    "SpecAccept": Kernel(
        accept.spec_accept_kernel,
        {
            "sampled": "*i64",
            "draft_tokens": "*i64",
            "draft_lens": "*i32",
            "forced_accept": "*i32",
            "emits": "*i1",
            "K": "i32",
            "tokens": "*i64",
            "num_tokens": "*i64",
        },
        {"BLOCK": accept.BLOCK},
        num_warps=1,
    ),
    "SpecSample": Kernel(
        sample.spec_sample_dense_kernel,
        {**_SAMPLE, **_SAMPLE_REST},
        {"OWN_IDS": False, "BLOCK": sample.BLOCK},
        sample.NUM_WARPS,
    ),
    "SpecSampleVocab": Kernel(
        sample.spec_sample_kernel,
        {**_SAMPLE, "vocab_ids": "*i64", **_SAMPLE_REST},
        {"OWN_IDS": True, "BLOCK": sample.BLOCK},
        sample.NUM_WARPS,
    ),
}
"""Plugin name -> kernel."""
