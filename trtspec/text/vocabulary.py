"""The tokens that two tokenizers have in common, for a draft model whose vocabulary is not its target's.

Tokens are the same if their texts are the same. Tokenizers write a blank at the beginning of a token as a marker:
U+0120 in byte-level tokenizers, U+2581 in those of sentencepiece. So a marker there counts as a blank. Nothing else is
made equal: bytes and line ends stay as each tokenizer spells them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from trtspec.errors import ConfigError
from trtspec.text.tokenizer import Tokenizer

_MARKERS = ("\u0120", "\u2581")


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """A one-to-one map between the tokens that a target of Vt ids and a draft of Vd ids have in common."""

    target_to_draft: Tensor  # [Vt] int64, -1 = the draft has no such token
    draft_to_target: Tensor  # [Vd] int64, the reverse; -1 = the target has no such token
    unknown: int  # draft id that stands for all tokens that the draft does not have

    @property
    def num_common(self) -> int:
        return int((self.draft_to_target >= 0).sum())


def map_vocabularies(
    target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int, draft_ends: Collection[int] = ()
) -> VocabularyMap:
    """Map between models of `target_size` and `draft_size` ids; each size may differ from its tokenizer's.

    If a tokenizer has a token twice, the lower id counts. Tokens that the draft does not have are represented by its
    unk_token, else its eos_token, else the lowest of `draft_ends`, ids that end a text. Raises ConfigError if it has
    none of these.
    """
    ours, theirs = _ids_by_text(target, target_size), _ids_by_text(draft, draft_size)
    common = [text for text in ours if text in theirs]
    in_target = torch.tensor([ours[text] for text in common], dtype=torch.int64)  # [n]
    in_draft = torch.tensor([theirs[text] for text in common], dtype=torch.int64)  # [n]
    target_to_draft, draft_to_target = torch.full((target_size,), -1), torch.full((draft_size,), -1)
    target_to_draft[in_target] = in_draft
    draft_to_target[in_draft] = in_target
    return VocabularyMap(target_to_draft, draft_to_target, _unknown(draft, draft_size, draft_ends))


def _ids_by_text(tokenizer: Tokenizer, size: int) -> dict[str, int]:
    """Text -> id, for the ids that a model of `size` ids has."""
    markers, found = _space_markers(tokenizer), dict[str, int]()
    for token, text in sorted((token, text) for text, token in tokenizer.vocabulary.items() if token < size):
        marker = next((marker for marker in markers if text.startswith(marker)), None)
        found.setdefault(text if marker is None else " " + text[len(marker) :], token)
    return found


def _space_markers(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Markers that the tokenizer may write for a blank: its own, or all known ones if an example does not show it."""
    try:
        ids = tokenizer.encode(" a", add_special_tokens=False)
    except Exception:  # the tokenizers library raises bare Exception if a vocabulary has no such text
        return _MARKERS
    first = tokenizer.token(ids[0]) if ids else None
    if first is not None and len(first) == 2 and first[1] == "a" and not first[0].isspace():
        return (first[0],)
    return _MARKERS


def _unknown(draft: Tokenizer, size: int, ends: Collection[int]) -> int:
    for token in (draft.unk_token_id, draft.eos_token_id, min(ends, default=None)):
        if token is not None and token < size:
            return token
    raise ConfigError(
        f"the draft's tokenizer {draft.name} has neither an unk_token nor an eos_token to stand for tokens it does not "
        "have; name one of them in its tokenizer_config.json"
    )
