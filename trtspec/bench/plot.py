"""Plots of the benchmarks' results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trtspec.bench.profile import PHASES
from trtspec.plotting import new_figure, save_png


def plot_acceptance(result: dict[str, Any], png: str | Path) -> None:
    """Plot the result of bench_acceptance by K.

    It shows acceptance length, tokens per step, and the share of drafts kept by position.
    """
    figure = new_figure(9, 4)
    left, right = figure.subplots(1, 2)
    rows = result["by_k"]
    ks = [row["k"] for row in rows]
    for name in ("acceptance_length", "tokens_per_step"):
        heights = [math.nan if row[name] is None else row[name] for row in rows]
        left.plot(ks, heights, marker="o", label=name.replace("_", " "))
    left.set_xlabel("K, draft tokens per step")
    left.set_ylabel("tokens per step: of those with drafts, of all")
    left.set_ylim(bottom=1.0)
    left.legend(fontsize="small")
    for row in rows:
        shares = row["acceptance_per_position"]
        right.plot(range(1, len(shares) + 1), [100 * share for share in shares], marker=".", label=f"K = {row['k']}")
    right.set_xlabel("draft position")
    right.set_ylabel("drafts kept there (%)")
    right.set_ylim(0, 100)
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.set_xticks(ks)
        axes.grid(alpha=0.3)
    save_png(figure, png)


def plot_adaptive(result: dict[str, Any], png: str | Path) -> None:
    """Plot the result of bench_adaptive: for each load, the speed-up of each number of drafts and of "auto"."""
    loads = result["loads"]
    figure = new_figure(2 + 1.4 * len(loads), 4)
    axes = figure.subplots()
    names = list(loads[0]["speedups"])
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(loads))]
        axes.bar(at, [load["speedups"][name] for load in loads], width=width, label=name)
    axes.axhline(1.0, color="black", linewidth=1, label="plain decoding")
    labels = [f"{load['clients']} client{'s' * (load['clients'] > 1)}\nT = {load['temperature']:g}" for load in loads]
    axes.set_xticks(range(len(loads)), labels)
    axes.set_ylabel("tokens per second, over plain decoding's")
    axes.legend(ncols=len(names) + 1, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.grid(alpha=0.3, axis="y")
    save_png(figure, png)


def plot_profile(results: dict[str, dict[str, Any]], png: str | Path) -> None:
    """Plot results of profile_decode by name, a bar for each: microseconds per step by phase."""
    figure = new_figure(8, 1.2 + 0.6 * len(results))
    axes = figure.subplots()
    start = [0.0] * len(results)
    for phase in PHASES:
        widths = [result["us_per_step"][phase] for result in results.values()]
        axes.barh(list(results), widths, left=start, label=phase)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.set_xlabel("µs per step (means of the middle half of them)")
    axes.invert_yaxis()
    axes.legend(ncols=len(PHASES), fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    save_png(figure, png)


def plot_serving(series: dict[str, list[float]], png: str | Path) -> None:
    """Plot the request latencies of bench serve.

    One panel has the time to first token (ms) of each request over the time at which it was due (s). The other has the
    distributions of time to first token and time per output token.
    """
    figure = new_figure(9, 4)
    left, right = figure.subplots(1, 2)
    left.plot(series["due"], series["time to first token"], ".", markersize=3)
    left.set_xlabel("request due at (s)")
    left.set_ylabel("time to first token (ms)")
    for name in ("time to first token", "time per output token"):
        values = sorted(series[name])
        right.plot(values, [100 * (i + 1) / len(values) for i in range(len(values))], label=name)
    right.set_xscale("log")
    right.set_xlabel("ms")
    right.set_ylabel("requests (%)")
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save_png(figure, png)
