"""The endpoints' answers, in the form that OpenAI's clients expect."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from trtspec.serve.engine.wire import Delta
from trtspec.text import Tokenizer

DONE = b"data: [DONE]\n\n"


class Reply:
    """The fields that all parts of one answer share. kind: "text_completion" or "chat.completion"."""

    def __init__(self, kind: str, model: str) -> None:
        self.id = f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{secrets.token_hex(12)}"
        self.kind, self.model, self.created = kind, model, int(time.time())

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a whole answer."""
        return {**self._head(self.kind), "choices": list(choices), "usage": usage}

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """A chunk of a stream, as a server-sent event."""
        kind = self.kind if self.kind == "text_completion" else "chat.completion.chunk"
        body = {**self._head(kind), "choices": list(choices), **({} if usage is None else {"usage": usage})}
        return event(body)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event with a JSON body."""
    return b"data: " + json_of(body) + b"\n\n"


def json_of(body: dict[str, Any]) -> bytes:
    """JSON in UTF-8. Half a surrogate pair, which JSON of a tool call may escape, becomes "?"."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")


class CompletionLogprobs:
    """OpenAI's `logprobs` of a completion: for each token its text, its logprob, the likeliest tokens, its offset.

    keep: whether `all` collects them; only whole answers need it.
    """

    def __init__(self, tokenizer: Tokenizer | None, keep: bool) -> None:
        self._tokenizer = tokenizer
        self._keep = keep
        self._length = 0
        self.all: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, delta: Delta) -> dict[str, list[Any]] | None:
        """Add a step's tokens; return their logprobs."""
        if delta.logprobs is None:
            return None
        news: dict[str, list[Any]] = {name: [] for name in self.all}
        for entry in delta.logprobs:
            words = [part_of(token, self._tokenizer).decode(errors="replace") for token, *_ in entry]
            news["tokens"].append(words[0])
            news["token_logprobs"].append(entry[0][1])
            likeliest: dict[str, float] = {}
            for word, one in zip(words, entry, strict=True):  # among equal texts the first counts, the drawn token's
                likeliest.setdefault(word, one[1])
            news["top_logprobs"].append(likeliest)
            news["text_offset"].append(self._length)
            self._length += len(words[0])
        if self._keep:
            for name, values in news.items():
                self.all[name] += values
        return news


class ChatLogprobs:
    """OpenAI's `logprobs` of a chat completion. top: number of likeliest tokens that are wanted for each token.

    keep: whether `all` collects them; only whole answers need it.
    """

    def __init__(self, tokenizer: Tokenizer | None, top: int, keep: bool) -> None:
        self._keep = keep
        self._tokenizer = tokenizer
        self._top = top
        self.all: dict[str, Any] = {"content": [], "refusal": None}

    def add(self, delta: Delta) -> dict[str, Any] | None:
        """Add a step's tokens; return their logprobs."""
        if delta.logprobs is None:
            return None
        news = []
        for drawn, *others in delta.logprobs:
            likeliest = sorted((drawn, *others), key=lambda one: one[2])[: self._top]
            news.append({**self._one(*drawn), "top_logprobs": [self._one(*one) for one in likeliest]})
        if self._keep:
            self.all["content"] += news
        return {"content": news, "refusal": None}

    def _one(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        part = part_of(token, self._tokenizer)
        return {"token": part.decode(errors="replace"), "logprob": logprob, "bytes": list(part)}


def word_of(token: int, tokenizer: Tokenizer | None) -> str:
    """Text of a token by itself; half a character is U+FFFD. Without a tokenizer, its id."""
    return str(token) if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


def part_of(token: int, tokenizer: Tokenizer | None) -> bytes:
    """Bytes of a token inside a text, which may be a part of a character. Without a tokenizer, its id."""
    return str(token).encode() if tokenizer is None else tokenizer.token_bytes(token)


def step_of(delta: Delta, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Outcome of a step, token by token: accepted drafts, the token after them, rejected drafts.

    If the drafts are a tree, "parents" has the number of the draft before each of them, or -1. The accepted ones come
    first.
    """

    def words(ids: Sequence[int]) -> list[str]:
        return [word_of(token, tokenizer) for token in ids]

    accepted = delta.num_accepted
    step: dict[str, Any] = {
        "accepted": words(delta.token_ids[:accepted]),
        "bonus": words(delta.token_ids[accepted:]),
        "rejected": words(delta.draft_ids[accepted:]),
        "draft_len": len(delta.draft_ids),
    }
    return step if delta.draft_parents is None else {**step, "parents": delta.draft_parents}
