"""Messages between the front and the engine's process: one JSON object per line, over a socket pair.

Front to engine:

    {"submit": id, "prompt": [token ids], "params": {...}}    params: fields of SamplingParams; id: the front's own
    {"abort": id}

Engine to front:

    {"ready": {...}}                                          once; fields of EngineInfo
    {"unusable": "message"}                                   instead, if the model cannot be loaded; the engine ends
    {"refused": id, "kind": "RequestError", "why": "..."}     the request cannot run
    {"deltas": [[...], ...], "load": {...}}                   a step's output: fields of Delta; EngineLoad after it
    {"failed": "message"}                                     a fault of no single request; the engine ends

Closing the socket ends the engine.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trtspec.config.tree import depth_of
from trtspec.errors import RequestError
from trtspec.outputs import SpeculationStats
from trtspec.sampling_params import SamplingParams, StructuredOutputs

MAX_LINE = 1 << 28
"""Bytes; a longer line is a fault."""


@dataclass(frozen=True)
class EngineInfo:
    """The facts about an engine that the front needs."""

    model: str  # folder
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    kv_tokens: int  # capacity of the KV cache
    mode: str  # SpeculativeDecodingMode
    max_draft_len: int  # K
    lossy: bool  # acceptance is forced


@dataclass(frozen=True)
class EngineLoad:
    """The totals since the engine started, and its current load."""

    running: int = 0  # samples
    waiting: int = 0
    kv_used: float = 0.0  # share of the KV cache's blocks
    steps: int = 0
    step_seconds: float = 0.0
    launch_seconds: float = 0.0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    drafter_failures: int = 0


class Delta(NamedTuple):
    """The output of one step for one sample of a request."""

    request: int
    sample: int  # index among the prompt's n samples
    text: str
    token_ids: list[int]
    draft_ids: list[int]  # drafts that the step verified
    num_accepted: int  # number of accepted drafts, which are the first of draft_ids and of token_ids
    is_context: bool  # the step that prefilled the prompt, or the last part of it
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[list[tuple[int, float, int]]] | None = None  # per token: [id, logprob, rank], its own first
    num_past_end: int = 0  # drafts accepted past the token that ends the sample
    draft_parents: list[int] | None = None  # the draft before each draft, -1 = the last token; None = a chain

    def add_to(self, stats: SpeculationStats) -> None:
        """Count this step in `stats`, unless it is a prefill step."""
        if self.token_ids and not self.is_context:
            num_tokens = self.num_accepted + self.num_past_end + 1
            stats.observe(num_tokens, len(self.draft_ids), depth=depth_of(self.draft_parents))


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from JSON, which has string keys and no classes. RequestError for values that are not allowed."""
    fields = dict(fields)
    if "logit_bias" in fields:
        try:
            fields["logit_bias"] = {int(token): value for token, value in fields["logit_bias"].items()}
        except ValueError as error:
            raise RequestError(f"logit_bias: a key is no token id ({error})") from error
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputs(**fields["structured_outputs"])
    return SamplingParams(**fields)


@dataclass
class Channel:
    """The engine's end of the socket, which receives and sends lines. Not thread-safe."""

    connection: socket.socket
    _pending: bytearray = field(default_factory=bytearray)

    def receive(self, wait: bool) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived; if `wait`, wait for one. EOFError if the other end is closed."""
        while True:
            self.connection.setblocking(wait)
            try:
                chunk = self.connection.recv(1 << 20)
            except BlockingIOError:
                break
            if not chunk:
                raise EOFError("the other end is closed")
            self._pending += chunk
            wait = wait and b"\n" not in chunk
        *lines, rest = self._pending.split(b"\n")
        self._pending = rest
        yield from map(json.loads, lines)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; return when the socket has taken it. ConnectionError if the other end is closed."""
        self.connection.setblocking(True)
        self.connection.sendall(encode(message))


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as one line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
