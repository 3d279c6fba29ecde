"""Where the tests find a Chromium. They bring none, and install none: see build_scripts/get_chromium.py."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

COPY = Path(__file__).parents[2] / "build" / "chromium"
"""What build_scripts/get_chromium.py makes."""


def installed() -> tuple[str, dict[str, str]] | None:
    """A binary, and what its environment must hold; None where there is none."""
    named = os.environ.get("TRTSPEC_CHROMIUM")
    for name in (named,) if named else ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found is not None:
            return found, {}
    if named or not (COPY / "chromium").exists():
        return None
    environment = {"LD_LIBRARY_PATH": str(COPY / "lib"), "FONTCONFIG_FILE": str(COPY / "fonts.conf")}
    return str(COPY / "chromium"), environment
