"""Venvs for contract tests: another project's packages, next to torch and the tools of the Python that runs this."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Unavailable(Exception):
    """An error that says that the packages are not available here."""


def make(folder: Path, packages: list[str], complete: Callable[[Path, Path], None], also: bytes = b"") -> Path:
    """Return the Python of a venv in the folder, which is made once per version of all its contents.

    The venv has the packages, without their dependencies. Then complete(Python, site-packages) completes it. also:
    further content on which the venv depends. Raises Unavailable.
    """
    python = folder / "bin" / "python"
    stamp = folder / "made-of"
    made_of = hashlib.sha256(repr((packages, sys.executable)).encode() + also).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_of:
        return python
    if folder.exists():
        shutil.rmtree(folder)
    venv.create(folder, with_pip=False, symlinks=True)
    site_packages = Path(output(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    lender = sysconfig.get_path("purelib")
    (site_packages / "lent.pth").write_text(f"import site; site.addsitedir({lender!r})\n", encoding="utf-8")
    print(f"installing {packages[0]} into {folder.relative_to(ROOT)} (torch is not downloaded again)", flush=True)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*install, "--no-deps", *packages], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise Unavailable(f"pip could not install {', '.join(packages)}: {' '.join(said[-2:]) or 'no reason given'}")
    complete(python, site_packages)
    stamp.write_text(made_of, encoding="utf-8")
    return python


def skipped(what: str, error: Unavailable) -> int:
    """Print visibly that nothing was checked -> exit status, 0."""
    line = "!" * 100
    print(f"{line}\nSKIPPED: nothing was checked against {what}: {error}\n{line}", flush=True)
    return 0


def output(python: Path, code: str, environment: dict[str, str] | None = None) -> str:
    """Return what a line of Python prints in that Python."""
    done = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return done.stdout.strip()
