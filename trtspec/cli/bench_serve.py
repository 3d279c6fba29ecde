"""`trtspec bench serve`: latencies and goodput of an OpenAI-compatible server, as a table, JSON and PNG."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trtspec.bench.plot import plot_serving
from trtspec.bench.serving import Objective, Told, arrivals, goodput, run_clients, summary
from trtspec.cli.prompts import read_jsonl, read_texts
from trtspec.errors import RequestError

ROWS = (
    ("ttft_ms", "time to first token, ms"),
    ("tpot_ms", "time per output token, ms"),
    ("itl_ms", "between parts of the text, ms"),
    ("e2e_ms", "whole request, ms"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: which server, how many requests, at which rate."""
    parser.add_argument("--url", required=True, help="http://host:port; /v1/completions is asked there")
    parser.add_argument("--served-name", help="the model to ask for (default: the first that the server lists)")
    parser.add_argument("--api-key", help="key of the server, if it asks for one")
    parser.add_argument(
        "--rate", type=float, default=float("inf"), help="requests a second (Poisson); inf = all at once"
    )
    parser.add_argument("--num-requests", type=int, default=100, help="how many requests are sent (default 100)")
    parser.add_argument(
        "--dataset", help='a .jsonl file of {"prompt": ...}, or a text file or folder of .py files to cut prompts from'
    )
    parser.add_argument("--input-chars", type=int, default=400, help="characters of prompts that are cut from texts")
    parser.add_argument("--output-len", type=int, default=128, help="tokens generated per prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default 0)")
    parser.add_argument("--stop-at-eos", action="store_true", help="otherwise all have --output-len tokens")
    parser.add_argument("--fields", default="{}", help="a JSON object: further fields of every request")
    parser.add_argument("--slo-ttft", type=float, help="ms to the first token that count as good")
    parser.add_argument("--slo-tpot", type=float, help="ms per output token that count as good")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, and of the choice of prompts")
    parser.add_argument("--json", help="write the result to this file")
    parser.add_argument("--png", help="draw the result to this file")


def run(namespace: argparse.Namespace) -> int:
    """Measure the server, and return 0 if every request succeeded, else 1."""
    if not namespace.rate > 0:
        raise RequestError(f"--rate = {namespace.rate} must be above 0")
    if namespace.num_requests < 1:
        raise RequestError(f"--num-requests = {namespace.num_requests} must be 1 or more")
    fields = _fields(namespace)
    url = _address(namespace.url)
    model = namespace.served_name or served_model(url, namespace.api_key)
    prompts = make_prompts(namespace.dataset, namespace.num_requests, namespace.input_chars, namespace.seed)
    asks = arrivals(prompts, namespace.output_len, namespace.rate, namespace.seed)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(asks))
        clients = run_clients(url, model, asks, fields, namespace.api_key, lambda: progress.advance(task))
        told = asyncio.run(clients)
    slo = {"ttft": namespace.slo_ttft, "tpot": namespace.slo_tpot}
    objective = Objective(*(None if ms is None else ms / 1000 for ms in slo.values()))
    result = summary(told) | {"slo_ms": slo, "goodput_s": goodput(told, objective)}
    show(result)
    if namespace.json:
        Path(namespace.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if namespace.png:
        plot_serving(_series(told), namespace.png)
    return 1 if result["failed"] else 0


def make_prompts(dataset: str | None, count: int, length: int, seed: int) -> list[str]:
    """Return `count` prompts: texts of `length` characters from anywhere in the dataset.

    A .jsonl file's prompts are taken whole, and again from the first if there are too few.
    """
    if dataset is not None and dataset.endswith(".jsonl"):
        whole = read_jsonl(Path(dataset))
        return [whole[i % len(whole)] for i in range(count)]
    texts = [text for text in read_texts(dataset) if len(text) > length]
    if not texts:
        raise RequestError(f"no text there has more than --input-chars = {length} characters; lower that")
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        text = rng.choice(texts)
        start = rng.randrange(len(text) - length)
        prompts.append(text[start : start + length])
    return prompts


def served_model(url: str, api_key: str | None) -> str:
    """Return the first model of the server's list. RequestError if there is no model, or no server."""
    request = urllib.request.Request(f"{url}/v1/models")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise RequestError(f"{url}/v1/models gives no model ({error}); check --url and --api-key") from error


def show(result: dict[str, Any]) -> None:
    """Print the result as a table, a line of rates, and the errors."""
    table = Table(title=f"{result['requests']} requests, {result['failed']} failed, {result['seconds']:.1f} s")
    for heading in ("", "mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, words in ROWS:
        if result[name] is not None:
            table.add_row(words, *(f"{result[name][key]:.2f}" for key in ("mean", "p50", "p90", "p99")))
    console = Console()
    console.print(table)
    rates = f"{result['requests_s']:.2f} requests/s, {result['tokens_s']:.1f} tokens/s"
    good = f"goodput {result['goodput_s']:.2f} requests/s" if any(result["slo_ms"].values()) else None
    share = result["accepted_share"]
    accepted = None if share is None else f"{share:.0%} of drafts accepted"
    console.print(", ".join(filter(None, (rates, good, accepted))))
    for error in result["errors"]:
        console.print(f"failed: {error}", style="red", markup=False)


def _address(url: str) -> str:
    """Return the URL of a server without a slash at its end. RequestError if it has a path, or no host."""
    try:
        parts = urlsplit(url)
        named = (parts.hostname or "").encode("idna")
        usable = parts.scheme in ("http", "https") and named and parts.port != 0
    except ValueError:  # of a port that is no number, or a name that none can have
        usable = False
    if not usable or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise RequestError(f"--url {url!r} is no address of a server; give http://host:port, without a path")
    return url.rstrip("/")


def _fields(namespace: argparse.Namespace) -> dict[str, Any]:
    try:
        fields = json.loads(namespace.fields)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--fields is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise RequestError(f"--fields is a {type(fields).__name__}; give a JSON object")
    ends: dict[str, Any] = {} if namespace.stop_at_eos else {"ignore_eos": True}
    return {"temperature": namespace.temperature, **ends, **fields}


def _series(told: list[Told]) -> dict[str, list[float]]:
    good = [one for one in told if one.error is None]
    return {
        "due": [one.ask.due for one in good],
        "time to first token": [1000 * (one.first or 0) for one in good],
        "time per output token": [1000 * one.per_token for one in good if one.per_token is not None],
    }
