"""Run the tests of trtspec's calls against FlashInfer's own package, without a GPU (make contract-flashinfer).

The package and all that its import needs come from the package registry, into their own venv under build/. torch and
the tools come from the Python that runs this script. FlashInfer imports without a GPU; its kernels are not run. Where
the packages are not available, the script says so and exits with 0. Once they are installed, any error is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from environments import ROOT, Unavailable, make, output, skipped

FOLDER = ROOT / "build" / "contract-flashinfer"
VERSION = "0.7.2"
PACKAGES = [  # its other dependencies serve kernels, or are there with torch and the tests' tools
    f"flashinfer-python=={VERSION}",
    "apache-tvm-ffi==0.1.15.post2",
    "nvidia-ml-py==13.615.71",
    "requests==2.34.2",
    "urllib3==2.8.0",
    "certifi==2026.10.18",
    "charset-normalizer==3.4.2",
    "idna==3.20",
]
TESTS = ["tests/contract/test_flashinfer_api.py", "tests/plugins/test_flashinfer.py"]
WITHOUT_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "FLASHINFER_WORKSPACE_BASE": str(FOLDER / "cache")}


def main(arguments: list[str]) -> int:
    try:
        python = make(FOLDER, PACKAGES, _complete)
    except Unavailable as error:
        return skipped(f"FlashInfer {VERSION}", error)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *TESTS]
    return subprocess.run(command, cwd=ROOT, env=WITHOUT_GPU, check=False).returncode


def _complete(python: Path, _: Path) -> None:
    version = output(python, "import flashinfer; print(flashinfer.__version__)", WITHOUT_GPU)
    assert version == VERSION, f"asked for FlashInfer {VERSION}, got {version}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
