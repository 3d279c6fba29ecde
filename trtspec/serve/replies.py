"""What the endpoints answer, as OpenAI's clients expect it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from trtspec.serve.wire import Delta
from trtspec.text import Tokenizer

DONE = b"data: [DONE]\n\n"


class Reply:
    """The frame that all parts of one answer share. kind: "text_completion" or "chat.completion"."""

    def __init__(self, kind: str, model: str) -> None:
        self.id = f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{secrets.token_hex(12)}"
        self.kind, self.model, self.created = kind, model, int(time.time())

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        return {**self._head(self.kind), "choices": list(choices), "usage": usage}

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """A server-sent event."""
        kind = self.kind if self.kind == "text_completion" else "chat.completion.chunk"
        body = {**self._head(kind), "choices": list(choices), **({} if usage is None else {"usage": usage})}
        return event(body)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event with JSON in it."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n\n"


def step_of(delta: Delta, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What a step did, token by token: drafts that were accepted, the token behind them, drafts that were rejected."""

    def words(ids: Sequence[int]) -> list[str]:
        return [str(token) if tokenizer is None else tokenizer.decode([token], False) for token in ids]

    accepted = delta.num_accepted
    return {
        "accepted": words(delta.token_ids[:accepted]),
        "bonus": words(delta.token_ids[accepted:]),
        "rejected": words(delta.draft_ids[accepted:]),
        "draft_len": len(delta.draft_ids),
    }
