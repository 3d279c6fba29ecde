"""How a draft model speaks with the target."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.methods.options import MethodOptions


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(MethodOptions):
    """use_heterogeneous_vocab: the draft has a tokenizer of its own."""

    use_heterogeneous_vocab: bool
