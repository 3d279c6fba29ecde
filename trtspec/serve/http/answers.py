"""Conversion of the engine's deltas to an endpoint's answer, whole or as a stream of events."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from trtspec.serve.engine.wire import Delta
from trtspec.serve.http.api_errors import ApiError, api_error
from trtspec.serve.http.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from trtspec.serve.http.replies import DONE, ChatLogprobs, CompletionLogprobs, Reply, event, json_of, step_of, word_of
from trtspec.serve.http.service import HTTPGeneration
from trtspec.serve.http.tools import CallParser, Notation, read_demanded

T = TypeVar("T")


class Answer(ABC):
    """An answer to one request. body: the request. generation: the generation that runs for it."""

    kind: str

    def __init__(self, body: GenerationRequest, generation: HTTPGeneration) -> None:
        self.body = body
        self.generation = generation
        self.tokenizer = generation.service.tokenizer
        self.reply = Reply(self.kind, generation.service.name)

    def opening(self) -> list[dict[str, Any]]:
        """Choices with which a stream begins, one chunk each."""
        return []

    @abstractmethod
    def part(self, choice: int, delta: Delta) -> dict[str, Any]:
        """Part of a choice that a step adds to a stream."""

    @abstractmethod
    def whole(self, choice: int) -> dict[str, Any]:
        """Choice of a whole answer, after all of its deltas were passed to `part`."""

    def ids(self, ids: list[int]) -> dict[str, Any]:
        """Field token_ids, if the request asks for it."""
        return {"token_ids": ids} if self.body.return_token_ids else {}

    def ending(self, choice: int) -> dict[str, Any]:
        """Why a choice ended; null while it runs."""
        tally = self.generation.tallies[choice]
        return {"finish_reason": tally.finish_reason, "stop_reason": tally.stop_reason}

    # -- send it, whole or as a stream --------------------------------------------------------------------------------

    async def respond(self, http: Request) -> Response:
        """Return the response. An error before anything is sent sets the HTTP status; a later one is an event."""
        if not self.body.stream:
            await unless_gone(http, self.generation, self._collect())
            choices = [self.whole(choice) for choice in range(len(self.generation.tallies))]
            body = json_of(self.reply.whole(choices, self.generation.usage()))
            return Response(body, media_type="application/json")
        steps = self.generation.__aiter__()
        first: tuple[int, Delta] = await unless_gone(http, self.generation, anext(steps))
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(first, steps), media_type="text/event-stream", headers=headers)

    async def _collect(self) -> None:
        async for choice, delta in self.generation:
            self.part(choice, delta)

    async def _events(self, first: tuple[int, Delta], steps: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        usage = options is not None and options.continuous_usage_stats
        try:
            async with aclosing(steps):  # type: ignore[type-var]
                for opening in self.opening():
                    yield self.reply.chunk([opening])
                yield self._chunk(*first, usage)
                async for choice, delta in steps:
                    yield self._chunk(choice, delta, usage)
            if options is not None and options.include_usage:
                yield self.reply.chunk([], self.generation.usage())
        except Exception as error:
            yield event(api_error(error).body)
        yield DONE

    def _chunk(self, choice: int, delta: Delta, with_usage: bool) -> bytes:
        part = self.part(choice, delta)
        if self.body.return_speculation:
            part["speculation"] = step_of(delta, self.tokenizer)
        return self.reply.chunk([part], self.generation.usage() if with_usage else None)


class CompletionAnswer(Answer):
    """An answer of /v1/completions. prompts: the text of each prompt if the answer repeats them, else None."""

    kind = "text_completion"
    body: CompletionRequest

    def __init__(self, body: CompletionRequest, generation: HTTPGeneration, prompts: list[str] | None) -> None:
        super().__init__(body, generation)
        self.prompts = prompts
        self.logprobs = [CompletionLogprobs(self.tokenizer, not body.stream) for _ in generation.tallies]

    def opening(self) -> list[dict[str, Any]]:
        """Choices that hold the prompts, if the answer repeats them."""
        if self.prompts is None:
            return []
        many = range(len(self.generation.tallies))
        return [{"index": c, "text": self._prompt(c), "logprobs": None, "finish_reason": None} for c in many]

    def part(self, choice: int, delta: Delta) -> dict[str, Any]:
        """Text and logprobs that a step adds to a choice."""
        text = {"index": choice, "text": delta.text, "logprobs": self.logprobs[choice].add(delta)}
        return {**text, **self.ending(choice), **self.ids(delta.token_ids)}

    def whole(self, choice: int) -> dict[str, Any]:
        """Choice with its whole text, after the prompt if the answer repeats it."""
        tally = self.generation.tallies[choice]
        logprobs = None if self.body.logprobs is None else self.logprobs[choice].all
        text = {"index": choice, "text": self._prompt(choice) + tally.text, "logprobs": logprobs}
        return {**text, **self.ending(choice), **self.ids(tally.token_ids)}

    def _prompt(self, choice: int) -> str:
        return "" if self.prompts is None else self.prompts[choice // self.body.n]


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions.

    notation: notation of tool calls, if there are tools and no call is demanded, else None. unhidden: the text shows
    special tokens only because the notation's markers are among them.
    """

    kind = "chat.completion"
    body: ChatCompletionRequest

    def __init__(
        self, body: ChatCompletionRequest, generation: HTTPGeneration, notation: Notation | None, unhidden: bool
    ) -> None:
        super().__init__(body, generation)
        many = range(len(generation.tallies))
        self.unhidden = unhidden
        names = [tool.function.name for tool in body.tools or ()]
        self.parsers = [CallParser(notation, names) for _ in many] if notation is not None else []
        self.contents = ["" for _ in many]
        self.logprobs = [ChatLogprobs(self.tokenizer, body.top_logprobs or 0, not body.stream) for _ in many]
        self.calls: list[list[dict[str, Any]]] = [[] for _ in many]

    def opening(self) -> list[dict[str, Any]]:
        """Choices that name the role of the speaker."""
        return [
            {"index": c, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            for c in range(len(self.generation.tallies))
        ]

    def part(self, choice: int, delta: Delta) -> dict[str, Any]:
        """Content, tool calls and logprobs that a step adds to a choice."""
        content, calls = self._read(choice, delta)
        self.contents[choice] += content
        first = len(self.calls[choice])
        self.calls[choice] += calls
        news: dict[str, Any] = {"content": content} if content else {}
        if calls:
            news["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(calls)]
        rest = {**self.ending(choice), **self.ids(delta.token_ids)}
        return {"index": choice, "delta": news, "logprobs": self.logprobs[choice].add(delta), **rest}

    def whole(self, choice: int) -> dict[str, Any]:
        """Choice with its whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.contents[choice], "refusal": None}
        if self.calls[choice]:
            message |= {"content": self.contents[choice] or None, "tool_calls": self.calls[choice]}
        rest = {**self.ending(choice), **self.ids(self.generation.tallies[choice].token_ids)}
        logprobs = self.logprobs[choice].all if self.body.logprobs else None
        return {"index": choice, "message": message, "logprobs": logprobs, **rest}

    def ending(self, choice: int) -> dict[str, Any]:
        """Why a choice ended; "tool_calls" instead of "stop" if it has tool calls."""
        ending = super().ending(choice)
        if ending["finish_reason"] == "stop" and self.calls[choice]:
            ending["finish_reason"] = "tool_calls"
        return ending

    def _read(self, choice: int, delta: Delta) -> tuple[str, list[dict[str, Any]]]:
        """Return the content and the tool calls that a step completes."""
        ended = delta.finish_reason is not None
        if self.body.demands_call:
            calls = read_demanded(self.generation.tallies[choice].text) if ended else []
            return "", [call.to_dict() for call in calls]
        if not self.parsers:
            return delta.text, []
        content = self.parsers[choice].push(delta.text, self._specials(delta) if self.unhidden else ())
        rest, calls = self.parsers[choice].finish() if ended else ("", [])
        return content + rest, [call.to_dict() for call in calls]

    def _specials(self, delta: Delta) -> list[str]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return []
        return [word_of(token, tokenizer) for token in delta.token_ids if tokenizer.is_special(token)]


async def unless_gone(http: Request, generation: HTTPGeneration, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client goes away, cancel `work` and its generation, and raise ApiError."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(http))
    both: list[asyncio.Future[Any]] = [task, gone]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client went away", code="client_closed_request")
    finally:
        for one in both:
            one.cancel()
            with suppress(BaseException):
                await one


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
