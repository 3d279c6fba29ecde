"""Drafts from a grammar: text that must come next is the same whatever the model says, so it need not be guessed.

A grammar often leaves only white space open, as JSON does after the colon of `"name": `. There the text goes on with
the spacing that it has had so far. Drafts of this kind are guesses like any others, and are verified like them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from trtspec.text import Tokenizer

CHARACTERS_PER_TOKEN = 8
"""Characters of text that are looked for, for each token that is drafted; most tokens have fewer."""
_WHITE = " \t\n\r"
_LONGEST_SPACE = 64
_KEPT_TEXTS = 4096  # of encoded texts: requests of one schema draft the same few
_ANCHORS = ("", "\n", ".")  # before a text, as some tokenizers begin every text with a blank
_VISIBLE = [chr(code) for code in range(33, 127)]


class Matcher(Protocol):
    """The part of xgrammar.GrammarMatcher that finds drafts."""

    def find_jump_forward_string(self) -> str:
        """Text that must come next."""

    def accept_string(self, text: str) -> bool:
        """Advance by a text, which is one step to `rollback`. False, and no change, if it is not allowed."""

    def fill_next_token_bitmask(self, mask: Tensor, row: int) -> bool:
        """Write which tokens may come next."""

    def is_completed(self) -> bool:
        """Whether the text may end."""

    def rollback(self, num_steps: int) -> None:
        """Take back the last steps."""


class Vocabulary:
    """Text of tokens, tokens of a text, and what a grammar allows of them.

    words [V]: bytes of each token, as the grammar reads them. Only the thread that runs steps may use it.
    """

    def __init__(self, tokenizer: Tokenizer, words: Sequence[bytes]) -> None:
        self._tokenizer, self._words = tokenizer, words
        self._encoded: dict[str, list[int]] = {}
        self._mask = torch.empty(1, -(-len(words) // 32), dtype=torch.int32)
        self._bits = self._mask[0].numpy().view(np.uint32)
        ids = {word: token for token, word in enumerate(words)}
        self._white = np.array([ids[one] for one in (b" ", b"\n") if one in ids], dtype=np.int64)
        self._visible = np.array([ids.get(one.encode(), -1) for one in _VISIBLE], dtype=np.int64)

    def only_character(self, matcher: Matcher) -> str:
        """The one visible ASCII character that may come next, if white space may come as well; else ""."""
        matcher.fill_next_token_bitmask(self._mask, 0)
        if not self._allowed(self._white).any():
            return ""
        found = np.flatnonzero(self._allowed(self._visible) & (self._visible >= 0))
        return _VISIBLE[found[0]] if len(found) == 1 else ""

    def must_end(self, matcher: Matcher, ends: Collection[int]) -> bool:
        """Whether the text may end, and not go on. ends: the tokens that end it."""
        if not matcher.is_completed():
            return False
        matcher.fill_next_token_bitmask(self._mask, 0)
        self._bits[-1] &= np.uint32((1 << (len(self._words) - 1) % 32 + 1) - 1)  # bits past the vocabulary may be set
        for end in ends:
            self._bits[end // 32] &= ~np.uint32(1 << end % 32)
        return not self._bits.any()

    def _allowed(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return (self._bits[ids // 32] >> (ids % 32).astype(np.uint32) & 1).astype(bool)

    def is_text(self, token: int) -> bool:
        """Whether the token stands for text."""
        return bool(self._words[token])

    def text(self, tokens: Sequence[int]) -> str:
        """Text of some tokens. What is no UTF-8 becomes U+FFFD."""
        return b"".join([self._words[token] for token in tokens]).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that continues another; none if the tokenizer changes the text."""
        found = self._encoded.get(text)
        if found is None:
            if len(self._encoded) >= _KEPT_TEXTS:
                self._encoded.clear()
            found = self._encoded[text] = self._encode(text)
        return found

    def _encode(self, text: str) -> list[int]:
        for anchor in _ANCHORS if text else ():
            try:
                before = self._tokenizer.encode(anchor, add_special_tokens=False) if anchor else []
                ids = self._tokenizer.encode(anchor + text, add_special_tokens=False)
            except Exception:  # a bare Exception, if a character has no token
                continue
            tokens = [token for token in ids[len(before) :] if token < len(self._words)]
            spelled = b"".join([self._words[token] for token in tokens])
            if ids[: len(before)] == before and spelled == text.encode("utf-8", "replace"):
                return tokens
        return []


class Spacing:
    """The white space between the parts of a text so far, which later parts of it are expected to have, too.

    A part is a run of letters and digits, another character, or all between two double quotes.
    """

    def __init__(self) -> None:
        self._between: dict[tuple[str, str], str] = {}  # by the last character of a part and the first of the next
        self._after = {":": " ", ",": " "}  # by the first of the two alone
        self._last = ""  # last character of the last part
        self._space = ""  # white space since then
        self._is_quoted = self._is_escaped = False

    def copy(self) -> Self:
        """A spacing that can be read on without a change to this one."""
        made = type(self)()
        vars(made).update(vars(self))
        made._between, made._after = dict(self._between), dict(self._after)
        return made

    def read(self, text: str) -> None:
        """Read on."""
        for one in text:
            if self._is_quoted:
                self._is_quoted = self._is_escaped or one != '"'
                self._is_escaped = one == "\\" and not self._is_escaped
            elif one in _WHITE:
                self._space = (self._space + one)[-_LONGEST_SPACE:]
            else:
                kind = _kind(one)
                self._between[self._last, kind] = self._after[self._last] = self._space
                self._last, self._space, self._is_quoted = kind, "", one == '"'

    def before(self, following: str) -> str:
        """White space that is expected next, if the character after it is `following`."""
        if self._is_quoted:
            return ""
        expected = self._between.get((self._last, _kind(following)), self._after.get(self._last, ""))
        return expected.removeprefix(self._space) if expected.startswith(self._space) else ""


def _kind(character: str) -> str:
    return "a" if character.isalnum() else character


@contextmanager
def next_text(matcher: Matcher, spacing: Spacing, vocabulary: Vocabulary, most: int) -> Iterator[str]:
    """Text of about `most` characters that must come next, but for white space.

    Within the context the matcher has accepted the text. After it, or after an error, its state is the one before.
    """
    spacing, parts, size = spacing.copy(), list[str](), 0
    try:
        while size < most:
            options = [_forced(matcher)[: most - size]]
            if not options[0]:
                only = vocabulary.only_character(matcher)
                options = [spacing.before(only) + only, only] if only else []
            part = next((one for one in options if matcher.accept_string(one)), None)
            if part is None:
                break
            parts.append(part)
            size += len(part)
            spacing.read(part)
        yield "".join(parts)
    finally:
        matcher.rollback(len(parts))


def _forced(matcher: Matcher) -> str:
    try:
        return matcher.find_jump_forward_string()
    except UnicodeDecodeError:  # of half a character; older versions of xgrammar do not leave it out
        return ""
