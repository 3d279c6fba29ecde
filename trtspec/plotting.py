"""PNG figures, drawn without a screen. Only this module uses matplotlib."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trtspec.errors import DependencyError


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure (inches). DependencyError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError('matplotlib is not installed; run: pip install "trtspec[bench]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure: Any, path: str | Path) -> None:
    """Write the figure as a PNG file, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    FigureCanvasAgg(figure).print_figure(temporary, format="png", dpi=120)
    os.replace(temporary, path)
