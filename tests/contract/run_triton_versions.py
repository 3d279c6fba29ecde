"""Compile every Triton kernel with an older Triton too, as a GPU's image may have it (make contract-triton-versions).

Each version comes from the package registry, into its own venv under build/. torch and the tools come from the Python
that runs this script. Kernels are launched with a driver without a device, then compiled for every architecture; none
runs. Where a version is not available, the script says so and goes on. Exit status: 1 if a launch hands over wrong
arguments, or a kernel does not compile, spills registers or takes too much shared memory.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from environments import ROOT, Unavailable, make, output, skipped

FOLDER = ROOT / "build" / "contract-triton-versions"
VERSIONS = ("3.6.0",)  # of torch 2.11; `make test` compiles with the version in constraints.txt


def main(arguments: list[str]) -> int:
    failed = 0
    for version in VERSIONS:
        try:
            python = make(FOLDER / version, [f"triton=={version}"], partial(_complete, version))
        except Unavailable as error:
            skipped(f"Triton {version}", error)
            continue
        launches = [str(python), "-m", "pytest", "-q", "tests/plugins/test_triton_driver.py"]
        command = [str(python), "build_scripts/build_plugins.py", "--target", "triton", *arguments]
        for one in (launches, command):
            failed |= subprocess.run(one, cwd=ROOT, check=False).returncode
    return int(failed != 0)


def _complete(version: str, python: Path, _: Path) -> None:
    found = output(python, "import triton; print(triton.__version__)")
    assert found == version, f"asked for Triton {version}, got {found}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
