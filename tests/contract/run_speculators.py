"""`make contract-speculators`: heads and drafts that the speculators package writes, against its own classes.

They are EAGLE3 heads and DFlash drafts. The package pins another torch and transformers than trtspec. So it is
installed into build/speculators with the packages that it imports, but without their dependencies. torch and
transformers are this environment's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "speculators"
PACKAGES = (
    "speculators==0.9.0", "hs-connectors==0.9.0", "datasets>=4", "pyarrow", "pandas", "dill", "multiprocess", "xxhash",
    "aiohttp", "fsspec", "loguru", "pydantic-settings", "python-dateutil", "pytz", "tzdata", "six",
)  # fmt: skip


def main() -> int:
    done = FOLDER / "made.txt"
    if not done.is_file() or done.read_text(encoding="utf-8") != repr(PACKAGES):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(FOLDER)]
        subprocess.run([*pip, *PACKAGES], check=True)
        done.write_text(repr(PACKAGES), encoding="utf-8")
    environment = {**os.environ, "SPECULATORS_PATH": str(FOLDER)}
    tests = map(str, sorted(Path(__file__).parent.glob("test_speculators*.py")))
    command = [sys.executable, "-m", "pytest", "-q", *tests, *sys.argv[1:]]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
