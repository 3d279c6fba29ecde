"""A client of any OpenAI-compatible server. Requests are sent by a clock, not when others finish.

Times count from when a request was due, even if the client sends it late. So a server that keeps its clients waiting
cannot hide it.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtspec.errors import DependencyError, RequestError


@dataclass(frozen=True)
class Ask:
    """A request: its prompt, its number of tokens, and when it is due, in seconds."""

    prompt: str
    max_tokens: int
    due: float


@dataclass
class Told:
    """The outcome of a request; times in seconds since it was due."""

    ask: Ask
    first: float | None = None  # first token
    last: float | None = None
    gaps: list[float] = field(default_factory=list)  # between parts of the text
    num_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Mean seconds per token without the first (time per output token); None for fewer than two tokens."""
        if self.first is None or self.last is None or self.num_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_tokens - 1)


@dataclass(frozen=True)
class Objective:
    """A limit of latencies that a request must keep to count for goodput, in seconds; None = no limit."""

    first_token: float | None = None
    per_token: float | None = None

    def kept(self, told: Told) -> bool:
        """Whether the request kept the limits; False if it failed."""
        if told.error is not None or told.first is None:
            return False
        late = self.first_token is not None and told.first > self.first_token
        slow = self.per_token is not None and (told.per_token or 0) > self.per_token
        return not late and not slow


def arrivals(prompts: Sequence[str], max_tokens: int, rate: float, seed: int) -> list[Ask]:
    """Return a request for each prompt, due as a Poisson process of `rate` per second; inf: all at once."""
    rng, now, asks = random.Random(seed), 0.0, []
    for prompt in prompts:
        asks.append(Ask(prompt, max_tokens, now))
        now += rng.expovariate(rate) if rate != float("inf") else 0.0
    return asks


async def run_clients(
    url: str, model: str, asks: Sequence[Ask], fields: dict[str, Any], api_key: str | None = None,
    on_done: Callable[[], None] = lambda: None, timeout: float = 600,
) -> list[Told]:  # fmt: skip
    """Send the requests when they are due; return their outcomes, in order.

    fields: fields of every request, in addition to prompt and model.
    """
    try:
        import aiohttp
        from aiohttp.http import HttpProcessingError
    except ImportError as error:
        raise DependencyError("bench serve needs aiohttp; pip install 'trtspec[bench]'") from error
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(url, connector=connector, headers=headers, timeout=limit) as session:
        start = time.perf_counter()

        async def one(ask: Ask) -> Told:
            told = Told(ask)
            await asyncio.sleep(start + ask.due - time.perf_counter())
            body = {"model": model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, **fields}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            try:
                async with session.post("/v1/completions", json=body) as answer:
                    if answer.status != 200:
                        told.error = f"{answer.status}: {(await answer.text())[:200]}"
                    else:
                        async for line in answer.content:
                            _read(told, line, time.perf_counter() - start - ask.due)
                if told.error is None and not told.num_tokens:
                    told.error = "no token came" if told.first is None else "no usage came, though it was asked for"
            except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as error:
                told.error = repr(error)
            except (ValueError, HttpProcessingError) as error:  # a line that is not JSON, or has no end
                told.error = repr(error)[:200]
            on_done()
            return told

        return await asyncio.gather(*map(one, asks))


def _read(told: Told, line: bytes, now: float) -> None:
    """Read a line of a stream, which came `now` seconds after the request was due, into `told`."""
    if not line.startswith(b"data: {"):
        return
    chunk = json.loads(line[6:])
    if "error" in chunk:
        said = chunk["error"]
        told.error = str(said.get("message", said) if isinstance(said, dict) else said)
    if chunk.get("choices"):
        if told.last is None:
            told.first = now
        else:
            told.gaps.append(now - told.last)
        told.last = now
    usage = chunk.get("usage") or {}
    told.num_tokens = usage.get("completion_tokens", told.num_tokens)
    details = usage.get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens") or 0
    told.accepted, told.drafted = accepted, accepted + (details.get("rejected_prediction_tokens") or 0)


def summary(told: Sequence[Told]) -> dict[str, Any]:
    """Return the figures of all requests: times in ms, rates per second. RequestError if no request succeeded."""
    good = [one for one in told if one.error is None]
    if not good:
        raise RequestError(f"no request succeeded; the first failed with: {told[0].error}")
    seconds = _seconds(told)
    tokens = sum(one.num_tokens for one in good)
    drafted = sum(one.drafted for one in good)
    return {
        "requests": len(told),
        "failed": len(told) - len(good),
        "errors": sorted({one.error for one in told if one.error is not None})[:5],
        "seconds": seconds,
        "requests_s": len(good) / seconds,
        "tokens_s": tokens / seconds,
        "ttft_ms": percentiles([one.first for one in good if one.first is not None]),
        "tpot_ms": percentiles([one.per_token for one in good if one.per_token is not None]),
        "itl_ms": percentiles([gap for one in good for gap in one.gaps]),
        "e2e_ms": percentiles([one.last for one in good if one.last is not None]),
        "accepted_share": sum(one.accepted for one in good) / drafted if drafted else None,
    }


def goodput(told: Sequence[Told], objective: Objective) -> float:
    """Number of requests per second that kept the objective."""
    return sum(map(objective.kept, told)) / _seconds(told)


def _seconds(told: Sequence[Told]) -> float:
    """Seconds until the last token of all requests."""
    return max((one.ask.due + (one.last or 0) for one in told if one.error is None), default=float("inf"))


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return the mean and percentiles, in ms; None if there are no values."""
    if not seconds:
        return None
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    return {"mean": 1000 * statistics.fmean(seconds), **{f"p{p}": 1000 * cuts[p - 1] for p in (50, 90, 99)}}
