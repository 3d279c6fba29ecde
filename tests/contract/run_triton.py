"""Run the tests against a real Triton Inference Server, without a GPU.

make test-triton runs all of them. make test, with TRTSPEC_TRITON_SHORT=1, runs those that stand for the rest. The
server is that of nvidia-pytriton's wheel (Linux, x86-64). It and its clients come from the package registry, into their
own venv under build/, since the clients need other versions than the rest. torch and the tools come from the Python
that runs this script. The server's python backend runs the first python3 on PATH, which is that venv's. Where the
packages are not available, the script says so and exits with 0. Once they are installed, any error is a failure.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from environments import ROOT, Unavailable, make, skipped

FOLDER = ROOT / "build" / "contract-triton"
PACKAGES = [
    "nvidia-pytriton==0.7.0",
    "tritonclient==2.73.0",
    "python-rapidjson==1.25",
    "grpcio==1.85.1",
    "protobuf==6.33.6",
]


def main(arguments: list[str]) -> int:
    try:
        python = make(FOLDER, PACKAGES, _complete)
    except Unavailable as error:
        return skipped("a Triton server", error)
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_timeout",
        *arguments,
        "tests/serve/test_triton_server.py",
    ]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    # Only one of the lender's pytest plugins, which take seconds to import, is loaded: the one that pyproject.toml
    # names.
    environment = {**os.environ, "PATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _complete(python: Path, packages: Path) -> None:
    home = packages / "pytriton" / "tritonserver"
    version = "{}.{}".format(*sys.version_info)
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise Unavailable(f"{PACKAGES[0]} has no python backend for Python {version}")
    backend = home / "backends" / "python"
    shutil.copy(stub, backend)
    for program in (home / "bin" / "tritonserver", backend / stub.name):  # wheels do not keep this bit
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    # The backend ignores PYTHONPATH.
    (packages / "checkout.pth").write_text(f"{ROOT}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
