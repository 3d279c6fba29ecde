"""Structured outputs: which tokens may come next, according to xgrammar. Only this module uses xgrammar.

A request has a `Guide`, whose state follows the tokens of the request. To verify drafts, the guide accepts them and
then rolls back, so that its state is unchanged if the step fails. grammar_drafts.py finds text that must come next.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from typing import Any

from torch import Tensor

from trtspec.errors import DependencyError, EngineError, RequestError
from trtspec.sampling_params import StructuredOutputs
from trtspec.text import Tokenizer
from trtspec.verify.grammar_drafts import CHARACTERS_PER_TOKEN, Spacing, Vocabulary, next_text
from trtspec.verify.schema import unenforced

_CACHE_BYTES = 256 * 2**20
"""Size of the cache of compiled grammars, which xgrammar keeps by their text."""


class Guide:
    """Position of one sample in its grammar.

    matcher: an xgrammar.GrammarMatcher. num_words: words of a mask row. ends: tokens that may end the text. The first
    one is drafted where the text must end.
    """

    def __init__(self, matcher: Any, num_words: int, vocabulary: Vocabulary, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self.num_words = num_words
        self._vocabulary, self._ends, self._spacing = vocabulary, ends, Spacing()

    def fill(self, allow_mask: Tensor, drafts: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Fill allow_mask [1 + len(drafts), ceil(V/32)] int32, whose bits are all set.

        Row 0 becomes the mask of tokens that may follow the text, and row j + 1 of those that may follow draft j and
        the drafts before it. parents: the draft before each draft, -1 = none; None = a chain. Rows after a draft that
        is not allowed, or that ends the text, do not change: no step reaches them.
        """
        self._matcher.fill_next_token_bitmask(allow_mask, 0)
        with closing(self._walk(drafts, range(-1, len(drafts) - 1) if parents is None else parents)) as nodes:
            for j in nodes:
                if not self._matcher.is_terminated():
                    self._matcher.fill_next_token_bitmask(allow_mask, j + 1)

    def allowed(self, drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The nodes of a tree that are allowed after the nodes before them, in ascending order. parents: as in fill."""
        return sorted(self._walk(drafts, parents))

    def next_tokens(self, most: int) -> list[int]:
        """At most `most` tokens of the text that must come next, and the end token if the text must end there.

        White space in it is a guess. At the end of text that goes on it is left out.
        """
        if most <= 0 or self._matcher.is_terminated():
            return []
        with next_text(self._matcher, self._spacing, self._vocabulary, CHARACTERS_PER_TOKEN * most) as text:
            ends = self._vocabulary.must_end(self._matcher, self._ends)
        told = text if ends else text.rstrip()
        tokens = self._vocabulary.encode(told)
        return [*tokens, self._ends[0]][:most] if ends and bool(tokens) == bool(told) else tokens[:most]

    def extend(self, drafts: Sequence[int], most: int) -> list[int]:
        """The drafts, which are allowed, and what must come next: at most `most` tokens."""
        kept = list(drafts[:most])
        if len(kept) == most:
            return kept
        spacing, taken = self._spacing, 0
        self._spacing = spacing.copy()
        try:
            for token in kept:
                self.accept([token])
                taken += 1
            return kept + self.next_tokens(most - len(kept))
        finally:
            self._matcher.rollback(taken)
            self._spacing = spacing

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by the request's new tokens. EngineError if one is not allowed, which forced acceptance may cause."""
        for token in tokens:
            if not self._matcher.accept_token(token):
                raise EngineError(
                    f"token {token} breaks the request's structured_outputs; drafts were accepted by force, which they "
                    "do not go together with"
                )
        self._spacing.read(self._vocabulary.text(tokens))

    def _takes(self, token: int) -> bool:
        """Advance by a token if it is allowed. xgrammar would warn of a special token that does not end the text."""
        return (token in self._ends or self._vocabulary.is_text(token)) and bool(self._matcher.accept_token(token))

    def _walk(self, drafts: Sequence[int], parents: Sequence[int]) -> Generator[int]:
        """Advance by each allowed draft in turn, and yield it. The matcher is in the same state again at the end."""
        walked: list[int] = []  # drafts that the matcher has accepted, each one after the one before
        left_out: set[int] = set()
        try:
            for j in _depth_first(parents[: len(drafts)]):
                if parents[j] in left_out:
                    left_out.add(j)
                    continue
                while walked and walked[-1] != parents[j]:
                    self._matcher.rollback(1)
                    walked.pop()
                if self._matcher.is_terminated() or not self._takes(drafts[j]):
                    left_out.add(j)
                    continue
                walked.append(j)
                yield j
        finally:
            if walked:
                self._matcher.rollback(len(walked))


def _depth_first(parents: Sequence[int]) -> list[int]:
    """Nodes of a tree, each one's descendants right after it. parents: the parent of each node, -1 = the root."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order, ahead = [], children.get(-1, [])[::-1]
    while ahead:
        order.append(ahead.pop())
        ahead += children.get(order[-1], [])[::-1]
    return order


class GrammarCompiler:
    """A compiler of guides for a model whose V ids `tokenizer` spells. DependencyError if xgrammar is missing."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise DependencyError(
                f"structured_outputs needs xgrammar ({error}): pip install 'trtspec[guided]'"
            ) from error
        self._xgrammar, self._num_words = xgrammar, -(-vocab_size // 32)
        vocabulary = xgrammar.TokenizerInfo(
            tokenizer.spelled(vocab_size),
            getattr(xgrammar.VocabType, tokenizer.spelling.upper()),
            vocab_size=vocab_size,
            stop_token_ids=[],
        )
        self._tokenizer, self._vocabulary = tokenizer, Vocabulary(tokenizer, vocabulary.decoded_vocab)
        threads = min(8, os.cpu_count() or 1)
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=threads, cache_limit_bytes=_CACHE_BYTES)

    def guides(self, wanted: StructuredOutputs, end_ids: Collection[int], count: int) -> list[Guide]:
        """Return `count` guides at the beginning of a text of the wanted form.

        end_ids: ids that may be drawn where the text may end. RequestError if there is none, or if `wanted` cannot be
        compiled or enforced.
        """
        if not end_ids:
            raise RequestError(
                "structured_outputs needs an id that ends the text, and this model folder names none; give "
                "stop_token_ids"
            )
        try:
            compiled = self._compiled(wanted)
            make = self._xgrammar.GrammarMatcher
            usual = self._tokenizer.eos_token_id
            ends = sorted(end_ids, key=lambda end: (end != usual, end))
            return [
                Guide(make(compiled, override_stop_tokens=ends), self._num_words, self._vocabulary, ends)
                for _ in range(count)
            ]
        except Exception as error:  # xgrammar raises whatever its C++ code does
            raise RequestError(f"structured_outputs: {str(error).strip() or type(error).__name__}") from error

    def _compiled(self, wanted: StructuredOutputs) -> Any:
        if wanted.json is not None:
            try:
                schema = json.loads(str(wanted.json))
            except ValueError as error:
                raise RequestError(f"json is no JSON ({error})") from error
            if ignored := unenforced(schema):
                raise RequestError(f"the schema has {ignored}, which cannot be enforced; leave it out")
            return self._compiler.compile_json_schema(wanted.json)
        if wanted.json_object:
            return self._compiler.compile_json_schema('{"type": "object"}', strict_mode=False)
        if wanted.regex is not None:
            return self._compiler.compile_regex(wanted.regex)
        if wanted.choice is not None:
            return self._compiler.compile_grammar(
                "root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in wanted.choice)
            )
        return self._compiler.compile_grammar(wanted.grammar)
