"""Plot of a training run: loss and acceptance length over steps."""

from __future__ import annotations

import json
from pathlib import Path

from trtspec.plotting import new_figure, save_png


def plot_metrics(metrics: Path, png: Path) -> None:
    """Draw a run's metrics.jsonl, as Trainer writes it, to `png`. Raises DependencyError if matplotlib is missing."""
    figure = new_figure(8, 6)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    panels = [
        ("loss per token", [("loss", "tab:blue", 0.4), ("smooth", "tab:blue", 1.0)]),
        (
            "acceptance length",
            [("acceptance_length", "tab:blue", 0.4), ("held_out_acceptance_length", "tab:orange", 1.0)],
        ),
    ]
    axes = figure.subplots(len(panels), 1, sharex=True)
    for ax, (label, curves) in zip(axes, panels, strict=True):
        for name, color, alpha in curves:
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                ax.plot(*zip(*points, strict=True), color=color, alpha=alpha, label=name.replace("_", " "))
        if ax.lines:
            ax.legend()
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    save_png(figure, png)
