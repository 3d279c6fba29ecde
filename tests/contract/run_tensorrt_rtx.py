"""Build networks with NVIDIA's TensorRT-RTX builder, which makes plans on a CPU (make contract-tensorrt-rtx).

--engines builds engines of backend tensorrt_rtx instead of the grid. The builder comes from the package registry, into
its own venv under build/. torch and the tools come from the Python that runs this script. Where the packages are not
available, the script says so and exits with 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from environments import ROOT, Unavailable, make, output, skipped

FOLDER = ROOT / "build" / "contract-tensorrt-rtx"
VERSION = "1.7.1.116"
PACKAGES = [f"tensorrt-rtx-cu13-libs=={VERSION}", f"tensorrt-rtx-cu13-bindings=={VERSION}"]


def main(arguments: list[str]) -> int:
    try:
        python = make(FOLDER, PACKAGES, _complete)
    except Unavailable as error:
        return skipped(f"TensorRT-RTX {VERSION}", error)
    module = "rtx_engines" if "--engines" in arguments else "rtx_grid"
    command = [str(python), "-m", f"tests.contract.{module}", *(one for one in arguments if one != "--engines")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _complete(python: Path, packages: Path) -> None:
    version = output(python, "import tensorrt_rtx_bindings; print(tensorrt_rtx_bindings.__version__)")
    assert version == VERSION, f"asked for TensorRT-RTX {VERSION}, got {version}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
