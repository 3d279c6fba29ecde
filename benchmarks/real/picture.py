"""The section `peers` as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtspec.plotting import new_figure, save_png

COLOURS = {
    "trtspec": "tab:green", "llama.cpp": "tab:orange", "vllm": "tab:blue", "openvino": "tab:purple",
    "transformers": "tab:gray",
}  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], png: Path) -> None:
    """Draw a panel for each format and batch, with a bar for each engine's setting.

    A bar shows the tokens a second of greedy decoding, averaged over all sets of prompts. Plain decoding is paler.
    """
    panels: dict[tuple[str, int], dict[tuple[str, str], list[float]]] = {}
    for row in rows:
        if row["temperature"] > 0:
            continue
        bars = panels.setdefault((row["format"], row["batch"]), {})
        bars.setdefault((row["peer"], row["setting"]), []).append(row["tokens_per_second"])
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    tallest = max(map(len, panels.values()))
    figure = new_figure(5.0 * columns, (0.26 * tallest + 0.9) * lines)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for ax, ((format, batch), bars) in zip(axes, panels.items(), strict=False):
        names = [f"{peer}, {setting}" for peer, setting in bars]
        speeds = [sum(own) / len(own) for own in bars.values()]
        colours = [COLOURS[peer] for peer, _ in bars]
        alphas = [0.5 if setting == "plain" else 1.0 for _, setting in bars]
        for place, (speed, colour, alpha) in enumerate(zip(speeds, colours, alphas, strict=True)):
            ax.barh(place, speed, color=colour, alpha=alpha)
            ax.text(speed, place, f" {speed:.0f}", va="center", fontsize=8)
        ax.set_yticks(range(len(names)), names, fontsize=8)
        ax.invert_yaxis()
        ax.set_xlim(right=1.12 * max(speeds))
        ax.set_title(f"{format}, batch {batch}, greedy: tok/s", fontsize=9)
    for ax in list(figure.axes)[len(panels) :]:
        ax.set_axis_off()
    save_png(figure, png)
