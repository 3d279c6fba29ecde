"""`make soak`: many clients for minutes, most of them well-behaved, and checks of the server.

    python -m tests.serve.soak --seconds 300 --streams 64 [--kill-every 30]

Clients read streams quickly or slowly, or leave in the middle; large streams are not read at all. Other clients send
bodies that are too large, bodies that are not JSON, and nonsense. Every stream that is read to its end must equal,
letter by letter, plain decoding offline. In the end nothing runs, no block of the KV cache is in use, and memory has
not grown. With --kill-every the engine's process is killed again and again. A stream may then end with an error that
says so, and nothing else changes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.serve.server import EAGLE3, Server, chat_model, running
from trtspec import LLM, SamplingParams

LIMITS = {"max_batch_size": 32, "max_seq_len": 512}
MAX_BODY = 65536
KINDS = ("whole", "slow", "left", "stalled", "large", "no json", "nonsense")
WEIGHTS = (20, 6, 8, 1, 2, 2, 2)
STALLED = {"prompt": "x", "max_tokens": 300, "n": 4, "logprobs": 5, "ignore_eos": True, "stream": True}
GONE = ("the engine has ended", "the engine is ")


@dataclass
class Seen:
    """The results that the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds_away: list[float] = field(default_factory=list)  # without service, after each kill
    megabytes: dict[str, list[float]] = field(default_factory=lambda: {"front": [], "engine": []})


@dataclass(frozen=True)
class Case:
    """A request and its expected text."""

    body: dict[str, Any]
    text: str


def make_cases(model: Path, count: int) -> list[Case]:
    """Make `count` requests with their texts by plain decoding."""
    rng = random.Random(0)
    bodies: list[dict[str, Any]] = [
        {
            "prompt": f"def {rng.choice(['read', 'write', 'sort', 'merge'])}_{rng.randrange(50)}(self, ",
            "max_tokens": rng.randint(1, 120),
            "temperature": rng.choice([0, 0.7, 1.0]),
            "seed": rng.randrange(2**31),
            "stop": rng.choice([["\n\n"], ["return"], []]),
        }
        for _ in range(count)
    ]
    with LLM(model, backend="eager", **LIMITS) as llm:
        params = [SamplingParams(**{k: v for k, v in body.items() if k != "prompt"}) for body in bodies]
        outputs = llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    return [
        Case({**{k: v for k, v in body.items() if v != []}, "stream": True}, text)
        for body, text in zip(bodies, texts, strict=True)
    ]


async def client(session: aiohttp.ClientSession, cases: Sequence[Case], seen: Seen, seed: int, end: float) -> None:
    """Run one client, which sends request after request until `end`."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        try:
            kind = rng.choices(KINDS, WEIGHTS)[0]
            if kind in ("whole", "slow", "left"):
                await _stream(session, rng.choice(cases), seen, kind, rng)
            elif kind == "stalled":
                await _stall(session, seen, rng)
            else:
                content = {
                    "large": b"x" * (MAX_BODY + 1),
                    "no json": b'{"prompt": ',
                    "nonsense": b'{"prompt": "x", "q": 1}',
                }
                async with session.post("/v1/completions", data=content[kind], headers=_JSON) as answer:
                    status = 413 if kind == "large" else 400
                    seen.counts[kind] += 1
                    if answer.status != status:
                        seen.wrong.append(f"{kind}: status {answer.status}: {(await answer.text())[:200]}")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            if kind == "large":
                seen.counts["large, cut off"] += 1  # connection closed while the body was being sent
            else:
                seen.wrong.append(f"{kind}: {error!r}")


async def _stall(session: aiohttp.ClientSession, seen: Seen, rng: random.Random) -> None:
    """Read nothing of an answer of megabytes for some seconds, then leave."""
    async with session.post("/v1/completions", json=STALLED) as answer:
        if answer.status == 200:
            await asyncio.sleep(rng.uniform(2, 5))
            seen.counts["stalled, then left"] += 1
            answer.close()


_JSON = {"Content-Type": "application/json"}


async def _stream(session: aiohttp.ClientSession, case: Case, seen: Seen, kind: str, rng: random.Random) -> None:
    text, parts, leave = "", 0, rng.randint(1, 12)
    async with session.post("/v1/completions", json=case.body) as answer:
        if answer.status != 200:
            words = await answer.text()
            away = answer.status == 503 and any(one in words for one in GONE)
            seen.counts["refused: the engine is away" if away else f"status {answer.status}"] += 1
            if away:
                await asyncio.sleep(0.2)
            elif answer.status != 429:
                seen.wrong.append(f"{kind}: status {answer.status}: {words[:200]}")
            return
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                lost = GONE[0] in chunk["error"]["message"]
                seen.counts["ended by an error: the engine was killed" if lost else "ended by an error"] += 1
                if not lost:
                    seen.wrong.append(f"{kind}: {chunk['error']['message']}")
                if not case.text.startswith(text):
                    seen.wrong.append(f"{case.body['prompt']!r}: {text!r} is not the beginning of {case.text!r}")
                return
            text += chunk["choices"][0]["text"]
            parts += 1
            if kind == "slow":
                await asyncio.sleep(0.05)
            if kind == "left" and parts == leave:
                break
        else:
            seen.counts[f"{kind}: read to the end"] += 1
            if text != case.text:
                seen.wrong.append(f"{case.body['prompt']!r}: {text!r} instead of {case.text!r}")
            return
    seen.counts["left in the middle"] += 1
    if not case.text.startswith(text):
        seen.wrong.append(f"{case.body['prompt']!r}: {text!r} is not the beginning of {case.text!r}")


async def watch(server: Server, seen: Seen, end: float) -> None:
    """Record the memory of both processes once a second."""
    while time.monotonic() < end:
        for name, pid in (("front", server.process.pid), ("engine", server.maybe_engine_pid)):
            if pid is not None:
                seen.megabytes[name].append(megabytes(pid))
        await asyncio.sleep(1)


async def kill(server: Server, seen: Seen, every: float, end: float) -> None:
    """Kill the engine's process again and again, and record how long the service was away each time."""
    while time.monotonic() + every < end:
        await asyncio.sleep(every)
        os.kill(server.engine_pid, signal.SIGKILL)
        start = time.monotonic()
        await asyncio.sleep(0.05)
        await asyncio.to_thread(server.wait_ready)
        seen.seconds_away.append(time.monotonic() - start)


def megabytes(pid: int) -> float:
    """Resident memory in MB; 0 for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


async def crowd(server: Server, cases: Sequence[Case], streams: int, seconds: float, kill_every: float | None) -> Seen:
    """Run all clients until the time is up -> what they saw."""
    seen, end = Seen(), time.monotonic() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:
        jobs = [client(session, cases, seen, seed, end) for seed in range(streams)]
        extra = [watch(server, seen, end)]
        if kill_every is not None:
            extra.append(kill(server, seen, kill_every, end))
        await asyncio.gather(*jobs, *extra)
    return seen


def grown(series: Sequence[float]) -> float:
    """Number of MB by which the last fifth of a series exceeds the second fifth."""
    fifth = max(len(series) // 5, 1)
    return statistics.median(series[-fifth:]) - statistics.median(series[fifth : 2 * fifth] or series[:1])


def missing(seen: Seen, asked: argparse.Namespace) -> list[str]:
    """Return the expected events that did not occur; without them, the soak would show nothing."""
    wanted = ["whole: read to the end", "slow: read to the end", "left in the middle", "stalled, then left", "no json"]
    wanted += ["nonsense"] if asked.kill_every is None else ["ended by an error: the engine was killed"]
    never = [f"never: {what}" for what in wanted if not seen.counts[what]]
    whole = seen.counts["whole: read to the end"]
    if whole < asked.seconds:
        never.append(f"only {whole} streams were read to the end")
    if asked.kill_every is not None and len(seen.seconds_away) < asked.seconds // asked.kill_every - 1:
        never.append(f"only {len(seen.seconds_away)} kills")
    return never


def main() -> int:
    """Run the soak -> exit status, 0 if there was no problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--kill-every", type=float, help="seconds between kills of the engine's process")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = chat_model(Path(folder) / "coder")
        cases = make_cases(model, 120)
        options = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
        options += ["--max-body", str(MAX_BODY)]
        with running(model, Path(folder) / "log", EAGLE3, options) as server:
            seen = asyncio.run(crowd(server, cases, asked.streams, asked.seconds, asked.kill_every))
            server.wait_idle()
            tokens, steps = server.metric("trtspec_generated_tokens_total"), server.metric("trtspec_steps_total")
    for what, count in sorted(seen.counts.items()):
        print(f"{count:7} {what}")
    print(f"{tokens:.0f} tokens; {steps:.0f} steps of the last engine; no block is held")
    for name, series in seen.megabytes.items():
        print(
            f"memory of the {name}: {series[0]:.0f} MB at first, {series[-1]:.0f} at last, grown {grown(series):.1f} MB"
        )
    problems = [*seen.wrong, *missing(seen, asked)]
    if grown(seen.megabytes["front"]) > 30 or (asked.kill_every is None and grown(seen.megabytes["engine"]) > 60):
        problems.append("memory grows")
    if seen.seconds_away:
        print(f"service was back after {', '.join(f'{one:.1f}' for one in seen.seconds_away)} s")
        if max(seen.seconds_away) > 5:
            problems.append("an engine took more than 5 s to come back")
    for problem in problems[:20]:
        print(f"WRONG: {problem}", file=sys.stderr)
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
