"""The curve of a run, for people: loss and acceptance length over steps."""

from __future__ import annotations

import json
from pathlib import Path

from trtspec.plotting import new_figure, save_png


def plot_metrics(metrics: Path, png: Path) -> None:
    """Draws a run's metrics.jsonl (see Trainer) to `png`. Raises DependencyError where matplotlib is missing."""
    figure = new_figure(8, 6)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    panels = [
        ("loss per token", [("loss", 0.4), ("smooth", 1.0)]),
        ("acceptance length", [("acceptance_length", 1.0)]),
    ]
    axes = figure.subplots(len(panels), 1, sharex=True)
    for ax, (label, curves) in zip(axes, panels, strict=True):
        for name, alpha in curves:
            points = [(line["step"], line[name]) for line in lines if name in line]
            ax.plot([step for step, _ in points], [value for _, value in points], color="tab:blue", alpha=alpha)
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    save_png(figure, png)
