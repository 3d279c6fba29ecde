"""Handling of a request in the front: checks, admission, the engine's deltas, deadlines and counts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.errors import EngineError, RequestError
from trtspec.outputs import SpeculationStats
from trtspec.serve.engine.client import EngineClient, Stream
from trtspec.serve.engine.wire import Delta, EngineInfo, sampling_params
from trtspec.serve.http.api_errors import ONCE, ApiError, api_error
from trtspec.serve.http.metrics import HTTPMetrics
from trtspec.serve.http.outcome import current
from trtspec.serve.http.protocol import MAX_GRAMMAR, MAX_SAMPLES, GenerationRequest
from trtspec.serve.settings import ServeSettings
from trtspec.text import Tokenizer

_PASSED_ON = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "include_stop_str_in_output", "skip_special_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias",
)  # fmt: skip
_LONG_TEXT = 20_000
"""Characters; longer texts of a request are tokenized in a thread, because they would hold up all streams."""


@dataclass
class Tally:
    """The output of one sample so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0  # accepted drafts among token_ids
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Add a step's output. ApiError if the sample failed."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.num_accepted += delta.num_accepted
        delta.add_to(self.speculation)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.error is not None:
            raise ApiError(500, f"the request failed: {delta.error}", code="request_failed", headers=ONCE)


@dataclass
class HTTPGeneration:
    """A running request: iterate over (choice, delta) of each step. Leaving the iteration ends the request.

    Raises ApiError for any error that ends the request early. The request counts for admission until close() is
    called; RequestLog does so at the end.
    """

    service: Service
    stream: Stream
    num_prompt_tokens: int
    timeout: float
    started: float
    tallies: list[Tally]
    request: GenerationRequest
    first_token: float | None = None  # seconds after the request started
    failed: ApiError | None = None

    @property
    def reason(self) -> str:
        """Why the request ended: the finish reasons of its samples, or a word for what went wrong."""
        if self.failed is not None:
            return self.failed.word
        reasons = {tally.finish_reason for tally in self.tallies}
        return "client_gone" if None in reasons else ",".join(sorted(filter(None, reasons)))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        metrics, loop = self.service.metrics, asyncio.get_running_loop()
        late = ApiError(408, f"the request took more than {self.timeout:g} s", code="timeout", headers=ONCE)
        deadline = loop.call_later(self.timeout, self.stream.end, late)
        last: dict[int, float] = {}
        try:
            while deltas := await self.stream.read():
                now = time.perf_counter()
                for delta in deltas:
                    choice = self.stream.choice(delta)
                    metrics.count(delta)
                    if delta.token_ids and choice not in last:
                        self.first_token = self.first_token or now - self.started
                        metrics.first_token.observe(now - self.started)
                    elif delta.token_ids:
                        metrics.between_tokens.observe((now - last[choice]) / len(delta.token_ids))
                    last[choice] = now
                    self.tallies[choice].add(delta)
                    yield choice, delta
            metrics.duration.observe(time.perf_counter() - self.started)
        except Exception as error:
            self.failed = api_error(error)
            raise self.failed from error
        finally:
            deadline.cancel()
            self.stream.end(ApiError(499, "the client went away"))

    def close(self) -> None:
        """Close the stream and finish the counts; the request has been answered, or will not be."""
        unfinished = sum(tally.finish_reason is None for tally in self.tallies)
        self.service.metrics.finished.labels("abort").inc(unfinished)
        if unfinished and self.failed is None:
            self.service.metrics.disconnects.inc()
        self.stream.close()

    @property
    def speculation(self) -> SpeculationStats:
        """Speculation counts of all samples so far."""
        return SpeculationStats.total(tally.speculation for tally in self.tallies)

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`, and under `speculation` the figures that it leaves out.

        Drafts that were accepted past a sample's end count under `speculation`, but not in the completion.
        """
        completion = sum(len(tally.token_ids) for tally in self.tallies)
        accepted, stats = sum(tally.num_accepted for tally in self.tallies), self.speculation
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": stats.num_draft_tokens - accepted,
            },
            "speculation": {
                "drafted_tokens": stats.num_draft_tokens,
                "accepted_tokens": stats.num_accepted_tokens,
                "num_drafts": stats.num_drafts,
                "steps": stats.steps,
            },
        }


def _name(model: str) -> str:
    """A model's name for clients: the name of its folder or file, or its name on the Hub."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


class Service:
    """The state and functions that the routes share."""

    def __init__(self, settings: ServeSettings, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        self.settings = settings
        self.client = client
        self.tokenizer = tokenizer
        self.name = settings.served_name or _name(settings.model)
        self.metrics = HTTPMetrics(client, self.name)
        if tokenizer is not None:
            tokenizer.name = self.name  # its errors reach clients, which must not see its folder
        self.created = int(time.time())
        self.stopping = False  # the server has been told to stop

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine. EngineError before the first engine is ready."""
        if self.client.info is None:
            raise EngineError(f"the engine is {self.client.state}; try again in a moment")
        return self.client.info

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served."""
        if name is not None and name != self.name:
            raise ApiError(404, f"there is no model {name!r} here, but {self.name!r}", "model", "model_not_found")

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of prompts, which are either all texts or all token ids. ApiError for texts without a tokenizer."""
        texts = [one for one in prompts if isinstance(one, str)]
        if not texts:
            return [one for one in prompts if not isinstance(one, str)]
        if self.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; send token ids", "prompt")
        encode = self.tokenizer.encode

        def encoded() -> list[list[int]]:
            return [encode(text) for text in texts]

        return await asyncio.to_thread(encoded) if sum(map(len, texts)) > _LONG_TEXT else encoded()

    async def encode_chat(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation. The template is a program that may be slow, so it runs in a thread."""
        if self.tokenizer is None:
            raise ApiError(400, "chat needs a tokenizer with a chat template, and the model has none", "messages")
        return await asyncio.to_thread(lambda: self.tokenizer.encode_chat(messages, **options))  # type: ignore[union-attr]

    @property
    def chat_template(self) -> str:
        """Source of the chat template for tools, else of the default one; "" if there is neither."""
        templates = {} if self.tokenizer is None else self.tokenizer.chat_templates
        return templates.get("tool_use", templates.get("default", ""))

    def hides(self, words: Sequence[str]) -> bool:
        """Whether any of the words is a special token, which texts leave out unless a request asks for them."""
        if self.tokenizer is None:
            return False
        tokens = map(self.tokenizer.token_id, words)
        return any(token is not None and self.tokenizer.is_special(token) for token in tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(ids)

    def room(self, prompts: Sequence[Sequence[int]]) -> int:
        """Number of tokens that may follow the longest prompt; 1 if it is too long, which `start` refuses."""
        return max(self.context - max(map(len, prompts), default=0), 1)

    def check_room(self, num_prompts: int, n: int) -> None:
        """Raise ApiError for more samples than a request may have, or than there is room for now.

        Call it before the prompts are tokenized, because that takes time.
        """
        num_samples = num_prompts * n
        if num_samples > MAX_SAMPLES:
            raise ApiError(
                400, f"{num_prompts} prompts with n = {n} are {num_samples} samples; {MAX_SAMPLES} at most", "n"
            )
        limit = self.info.max_batch_size + self.settings.max_queue
        if self.client.num_samples + num_samples > limit:
            self.metrics.refused.inc()
            raise ApiError(
                429, f"{self.client.num_samples} samples are in flight, {limit} at most; try again later",
                code="queue_full", headers={"Retry-After": "1"},
            )  # fmt: skip

    def start(
        self, request: GenerationRequest, prompts: Sequence[Sequence[int]], more: Mapping[str, Any], started: float
    ) -> HTTPGeneration:
        """Submit a request to the engine. more: fields of SamplingParams in addition to those of all endpoints."""
        for prompt in prompts:
            self._check_length(prompt, more.get("max_tokens"))
        params = self._params(request, more)
        self.check_room(len(prompts), request.n)  # again: other requests came while the prompts were tokenized
        stream = self.client.submit(prompts, params)
        num_prompt_tokens = sum(map(len, prompts))
        self.metrics.prompt_tokens.inc(num_prompt_tokens)
        timeout = min(request.timeout or self.settings.timeout, self.settings.timeout)
        tallies = [Tally() for _ in range(len(prompts) * request.n)]
        generation = HTTPGeneration(self, stream, num_prompt_tokens, timeout, started, tallies, request)
        if (record := current()) is not None:
            record.generation = generation
        return generation

    @property
    def context(self) -> int:
        """Maximum number of tokens of a prompt and its completion together."""
        return min(self.info.max_seq_len, self.info.kv_tokens)

    def _check_length(self, prompt: Sequence[int], max_tokens: int | None) -> None:
        if not prompt:
            raise ApiError(400, "the prompt is empty; give at least one token", "prompt")
        vocab_size, most = self.info.vocab_size, self.context
        if max(prompt) >= vocab_size:
            raise ApiError(400, f"token id {max(prompt)} is none: ids are 0..{vocab_size - 1}", "prompt")
        if len(prompt) + (max_tokens or 1) > most:
            raise ApiError(
                400,
                f"{len(prompt)} tokens of prompt and max_tokens = {max_tokens or 1} exceed the context of {most}",
                "max_tokens" if len(prompt) < most else "prompt",
                "context_length_exceeded",
            )

    def _params(self, request: GenerationRequest, more: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of SamplingParams that the request sets. ApiError if they contradict each other."""
        params = {name: getattr(request, name) for name in _PASSED_ON if name in request.model_fields_set}
        params |= more
        if request.num_speculative_tokens is not None:
            params["max_draft_len"] = request.num_speculative_tokens
        params = {name: value for name, value in params.items() if value is not None}
        try:
            size = len(json.dumps(params.get("structured_outputs"), ensure_ascii=False))
            if size > MAX_GRAMMAR:
                raise RequestError(f"the schema, grammar or choices have {size} characters; {MAX_GRAMMAR} at most")
            sampling_params(params)
        except RecursionError as error:
            raise ApiError(400, "the schema is nested too deep; flatten it") from error
        except RequestError as error:
            raise ApiError(400, str(error)) from error
        return params
