"""`trtspec bench decode | acceptance | adaptive`: the measurements of trtspec.bench as tables, JSON and PNG."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trtspec.bench import bench_acceptance, bench_adaptive, bench_decode, profile_decode
from trtspec.bench.plot import plot_acceptance, plot_adaptive, plot_profile
from trtspec.bench.profile import PHASES
from trtspec.build.engine_folder import EngineFolder
from trtspec.cli.options import engine_options
from trtspec.cli.prompts import read_jsonl, read_texts
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import ConfigError, RequestError
from trtspec.hub.folders import checkpoint_folder
from trtspec.sampling_params import SamplingParams
from trtspec.text import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench decode`: batch shape, prompts, output."""
    parser.add_argument("--batch", type=int, default=1, help="requests decoded together")
    parser.add_argument("--input-len", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens generated per prompt")
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats, after one that warms up")
    parser.add_argument(
        "--against", help="checkpoint or engine folder to compare with (default: with --spec..., --model without it)"
    )
    parser.add_argument("--profile", action="store_true", help="where a step's time goes, instead of tokens per second")
    _add_prompts_and_outputs(parser)


def add_acceptance_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench acceptance`."""
    parser.add_argument("--num-prompts", type=int, default=40, dest="batch", help="prompts to generate for")
    parser.add_argument("--input-len", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens generated per prompt")
    parser.add_argument("--max-k", type=int, default=8, help="K = 1 up to this")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampled requests")
    _add_prompts_and_outputs(parser)


def add_adaptive_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench adaptive`."""
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 1], help="one after another, in one trace")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="for each number of clients")
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 3], help="numbers of drafts to compare with")
    parser.add_argument("--answers", type=int, default=2, help="answers of each client")
    parser.add_argument("--input-len", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--output-len", type=int, default=96, help="tokens generated per prompt")
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats, after one that warms up")
    _add_prompts_and_outputs(parser)


def _add_prompts_and_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", help='a .jsonl file of {"prompt": ...} or a text file or folder of .py files to cut prompts from'
    )
    parser.add_argument("--random-prompts", action="store_true", help="random token ids instead of text")
    parser.add_argument("--json", help="write the result to this file")
    parser.add_argument("--png", help="draw the result to this file")


def run_acceptance(namespace: argparse.Namespace) -> int:
    """Measure acceptance by K, print a table, and write the JSON and PNG files."""
    _check_positive(namespace, "batch", "input_len", "output_len", "max_k")
    if namespace.speculative_config is None:
        raise ConfigError("bench acceptance measures speculation; give --spec-method, --spec-model or --spec")
    prompts = make_prompts(namespace)
    params = SamplingParams(
        temperature=namespace.temperature,
        seed=None if namespace.temperature == 0 else namespace.seed,
        max_tokens=namespace.output_len,
        ignore_eos=True,
        detokenize=False,
    )
    with Console(stderr=True).status("") as status:
        result = bench_acceptance(
            namespace.model,
            namespace.speculative_config,
            prompts,
            params,
            range(1, namespace.max_k + 1),
            progress=status.update,
            **engine_options(namespace),
        )
    table = Table(title=f"{len(prompts)} prompts, output equals plain: {'yes' if result['lossless'] else 'NO'}")
    for heading in ("K", "acceptance length", "tokens per step", "kept at position 1..K"):
        table.add_column(heading, justify="right" if heading != "kept at position 1..K" else "left")
    for row in result["by_k"]:
        kept = shares(row["acceptance_per_position"])
        table.add_row(str(row["k"]), figure(row["acceptance_length"], 3), figure(row["tokens_per_step"], 3), kept)
    Console().print(table)
    if namespace.png:
        plot_acceptance(result, namespace.png)
    _write_json(namespace, result)
    return 0


def run_adaptive(namespace: argparse.Namespace) -> int:
    """Measure "auto" while the load changes, print a table, and write the JSON and PNG files."""
    if namespace.speculative_config is None:
        raise ConfigError("bench adaptive measures speculation; give --spec-method, --spec-model or --spec")
    _check_positive(namespace, "input_len", "output_len", "answers", "repeats")
    for name in ("clients", "fixed"):
        if min(getattr(namespace, name)) < 1:
            raise RequestError(f"--{name} {' '.join(map(str, getattr(namespace, name)))}: each must be at least 1")
    namespace.batch = max(namespace.clients) * namespace.answers
    prompts = make_prompts(namespace)
    if len(prompts) < namespace.batch:
        raise RequestError(
            f"{namespace.prompts} has {len(prompts)} prompts, and {max(namespace.clients)} clients with "
            f"{namespace.answers} answers each ask {namespace.batch}; give more, or lower --clients or --answers"
        )
    with Console(stderr=True).status("") as status:
        result = bench_adaptive(
            namespace.model,
            namespace.speculative_config,
            prompts,
            namespace.output_len,
            namespace.clients,
            namespace.temperatures,
            namespace.fixed,
            namespace.repeats,
            progress=status.update,
            **engine_options(namespace),
        )
    table = Table(title=f"times plain decoding; output equals plain: {'yes' if result['lossless'] else 'NO'}")
    headings = ("clients", "T", "plain, tokens/s", *result["loads"][0]["speedups"], "auto / best", "null")
    for heading in (*headings, "drafts a token"):
        table.add_column(heading, justify="right")
    for load in result["loads"]:
        cells = [str(load["clients"]), f"{load['temperature']:g}", figure(load["plain_tok_s"], 0)]
        cells += [f"{value:.2f}x" for value in load["speedups"].values()]
        cells += [f"{load['auto_over_best']:.2f}x", figure(load["null"]), figure(load["drafts_per_token"])]
        table.add_row(*cells)
    Console().print(table)
    if namespace.png:
        plot_adaptive(result, namespace.png)
    _write_json(namespace, result)
    return 0


def run_profile(namespace: argparse.Namespace, prompts: list[list[int]], options: dict[str, Any]) -> int:
    """Print the time per phase of a step, for the model and for what it is compared with.

    The comparison is that of `bench decode` without --profile.
    """
    model, speculative_config = namespace.model, namespace.speculative_config
    if namespace.against is not None:
        name = model if model != namespace.against else f"{model}, speculative"
        runs = {namespace.against: (namespace.against, None), name: (model, speculative_config)}
    elif speculative_config is not None:
        runs = {"plain": (model, None), "speculative": (model, speculative_config)}
    else:
        runs = {_kind(model): (model, None)}
    results = {
        name: profile_decode(folder, config, prompts, namespace.output_len, **options)
        for name, (folder, config) in runs.items()
    }
    table = Table(title="µs per step, means of the middle half of them")
    table.add_column("", min_width=11, overflow="fold")
    for heading in (*PHASES, "total", "acceptance length", "tokens per step"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        figures = [f"{result['us_per_step'][phase]:.0f}" for phase in (*PHASES, "total")]
        figures += [figure(result["acceptance_length"]), figure(result["tokens_per_step"])]
        table.add_row(Path(name).name, *figures)
    Console().print(table)
    if namespace.png:
        plot_profile(results, namespace.png)
    _write_json(namespace, results)
    return 0


def _kind(model: str) -> str:
    """Name of the decoding that a model folder does by itself: an engine may bring speculation."""
    engine = EngineFolder.open(model)
    return "plain" if engine is None or engine.speculative_config() is None else "speculative"


def _check_positive(namespace: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(namespace, name) < 1:
            shown = "num-prompts" if name == "batch" and "max_k" in namespace else name.replace("_", "-")
            raise RequestError(f"--{shown} = {getattr(namespace, name)} must be at least 1")


def _write_json(namespace: argparse.Namespace, result: dict[str, Any]) -> None:
    if namespace.json:
        Path(namespace.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def run(namespace: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON file."""
    _check_positive(namespace, "batch", "input_len", "repeats")
    prompts = make_prompts(namespace)
    if len(prompts) < namespace.batch:
        raise RequestError(
            f"{namespace.prompts} has {len(prompts)} prompts for --batch {namespace.batch}; give more, or lower --batch"
        )
    if namespace.against is None and namespace.speculative_config is not None and _kind(namespace.model) != "plain":
        raise ConfigError(
            f"{namespace.model} is an engine with speculation of its own, which has no plain decoding to compare with; "
            "name what to compare with (--against)"
        )
    console = Console(stderr=True)
    options = {"max_batch_size": namespace.batch, **engine_options(namespace)}
    if namespace.profile:
        return run_profile(namespace, prompts, options)
    if namespace.png:
        raise RequestError("--png draws --profile; give both, or neither")
    with console.status("") as status:
        result = bench_decode(
            namespace.model,
            namespace.speculative_config,
            prompts,
            namespace.output_len,
            namespace.repeats,
            progress=status.update,
            against=namespace.against,
            **options,
        )
    print_table(result, Console())
    _write_json(namespace, result)
    return 0


def make_prompts(namespace: argparse.Namespace) -> list[list[int]]:
    """Return `batch` prompts of `input_len` token ids each.

    A prompt is the start of a text of its own, or random ids with a fixed seed. Prompts of a .jsonl file are whole.
    """
    folder = checkpoint_folder(namespace.model, revision=namespace.revision)
    if namespace.random_prompts:
        engine = EngineFolder.open(folder)
        ids = range(ModelConfig.from_folder(folder if engine is None else engine.path / "target").vocab_size)
        return [random.Random(b).choices(ids, k=namespace.input_len) for b in range(namespace.batch)]
    tokenizer = Tokenizer.named(namespace.tokenizer) if namespace.tokenizer else Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise RequestError("this model folder has no tokenizer.json; use --random-prompts or --tokenizer FOLDER")
    if namespace.prompts and namespace.prompts.endswith(".jsonl"):
        return [tokenizer.encode(text) for text in read_jsonl(Path(namespace.prompts))][: namespace.batch]
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


def print_table(result: dict[str, Any], console: Console) -> None:
    """Print one row per figure."""
    table = Table(show_header=False, box=None)

    def row(name: str, value: str) -> None:
        table.add_row(name, value)

    row("tokens/s", f"{result['tok_s']:.1f}")
    if result["speedup"] is not None:
        other = result["against"]
        row(f"{other or 'plain decoding'}, same run", f"{result['plain_tok_s']:.1f}")
        row("speed-up", f"{result['speedup']:.2f}x")
        row(f"output equals {'plain' if other is None else 'its'}", "yes" if result["lossless"] else "NO")
        row("acceptance length", figure(result["acceptance_length"]))
        row("tokens per step", figure(result["tokens_per_step"]))
        row("acceptance per position", shares(result["acceptance_per_position"]))
    row("weights read per step", f"{result['weight_bytes_per_step'] / 1e6:.1f} MB")
    row("read bandwidth", f"{result['read_gbs']:.1f} GB/s")
    row("share of that limit", f"{result['roofline_ratio']:.1%}")
    row("host time per step", f"{result['host_us_per_step']:.0f} us")
    row("load / first token", f"{result['load_s']:.2f} s / {result['first_token_s']:.2f} s")
    row("peak memory", f"{result['peak_rss_bytes'] / 1e6:.0f} MB")
    console.print(table)


def shares(values: Sequence[float]) -> str:
    """Return fractions as percentages."""
    return " ".join(f"{value:.0%}" for value in values)


def figure(value: float | None, digits: int = 2) -> str:
    """Return the value with `digits` decimals; "-" if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
