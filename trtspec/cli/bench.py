"""`trtspec bench decode`: the measurement of trtspec.bench, on code prompts or random ones, as a table and JSON."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trtspec.bench import bench_decode
from trtspec.config.model import ModelConfig
from trtspec.errors import RequestError
from trtspec.text import Tokenizer
from trtspec.train.data import standard_library


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Batch shape, prompts, output."""
    parser.add_argument("--batch", type=int, default=1, help="requests decoded together")
    parser.add_argument("--input-len", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens generated per prompt")
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats, after one that warms up")
    parser.add_argument("--prompts", help="a text file or folder of .py files to cut prompts from")
    parser.add_argument("--random-prompts", action="store_true", help="random token ids instead of text")
    parser.add_argument("--json", help="write the result to this file")


def run(namespace: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON file."""
    from trtspec.cli.main import engine_options

    for name in ("batch", "input_len", "output_len", "repeats"):
        if getattr(namespace, name) < 1:
            raise RequestError(f"--{name.replace('_', '-')} = {getattr(namespace, name)} must be at least 1")
    prompts = make_prompts(namespace)
    console = Console(stderr=True)
    options = {"max_batch_size": namespace.batch, **engine_options(namespace)}
    with console.status("") as status:
        result = bench_decode(
            namespace.model,
            namespace.speculative_config,
            prompts,
            namespace.output_len,
            namespace.repeats,
            progress=status.update,
            **options,
        )
    print_table(result, Console())
    if namespace.json:
        Path(namespace.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def make_prompts(namespace: argparse.Namespace) -> list[list[int]]:
    """`batch` prompts of `input_len` token ids: the starts of texts, one each; or random ids, with a fixed seed."""
    if namespace.random_prompts:
        ids = range(ModelConfig.from_folder(namespace.model).vocab_size)
        return [random.Random(b).choices(ids, k=namespace.input_len) for b in range(namespace.batch)]
    tokenizer = Tokenizer.from_folder(namespace.tokenizer or namespace.model)
    if tokenizer is None:
        raise RequestError("this model folder has no tokenizer.json; use --random-prompts or --tokenizer FOLDER")
    texts = read_texts(namespace.prompts)
    random.Random(0).shuffle(texts)
    prompts: list[list[int]] = []
    for text in texts:
        tokens = tokenizer.encode(text[: 16 * namespace.input_len])
        if len(tokens) >= namespace.input_len:
            prompts.append(tokens[: namespace.input_len])
        if len(prompts) == namespace.batch:
            return prompts
    raise RequestError(
        f"only {len(prompts)} texts of {namespace.input_len} tokens for --batch {namespace.batch}; "
        "lower --input-len or --batch, or give --prompts"
    )


def read_texts(source: str | None) -> list[str]:
    """The given file or folder of .py files; without one, the held-out files of Python's own standard library."""
    if source is None:
        return [file.text for file in standard_library() if file.held_out]
    path = Path(source)
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def print_table(result: dict[str, Any], console: Console) -> None:
    """One row per figure."""
    table = Table(show_header=False, box=None)

    def row(name: str, value: str) -> None:
        table.add_row(name, value)

    row("tokens/s", f"{result['tok_s']:.1f}")
    if result["speedup"] is not None:
        row("plain decoding, same run", f"{result['plain_tok_s']:.1f}")
        row("speed-up", f"{result['speedup']:.2f}x")
        row("output equals plain", "yes" if result["lossless"] else "NO")
        row("acceptance length", f"{result['acceptance_length']:.2f}")
        row("acceptance per position", shares(result["acceptance_per_position"]))
    row("weights read per step", f"{result['weight_bytes_per_step'] / 1e6:.1f} MB")
    row("read bandwidth", f"{result['read_gbs']:.1f} GB/s")
    row("share of that limit", f"{result['roofline_ratio']:.1%}")
    row("host time per step", f"{result['host_us_per_step']:.0f} us")
    row("load / first token", f"{result['load_s']:.2f} s / {result['first_token_s']:.2f} s")
    row("peak memory", f"{result['peak_rss_bytes'] / 1e6:.0f} MB")
    console.print(table)


def shares(values: Sequence[float]) -> str:
    """Fractions as percentages."""
    return " ".join(f"{value:.0%}" for value in values)
