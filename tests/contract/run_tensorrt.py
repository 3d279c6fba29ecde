"""Run the tests of the TensorRT plugins against its real Python bindings, without a GPU (make contract-tensorrt).

The bindings and the lean runtime come from the package registry, into their own venv under build/. torch and the tools
come from the Python that runs this script. The bindings also link to libnvinfer, libnvinfer_plugin and libnvonnxparser,
which the registry does not have without a GPU's driver. These are compiled from stubs.c: enough for the plugin
registry, the plugin classes and every declaration of the API, not for a builder or an engine. Where the packages are
not available, the script says so and exits with 0. Once they are installed, any error is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from environments import ROOT, Unavailable, make, output, skipped

FOLDER = ROOT / "build" / "contract-tensorrt"
VERSION = "11.4.0.106"
PACKAGES = [
    f"tensorrt_cu13=={VERSION}",
    f"tensorrt_cu13_bindings=={VERSION}",
    f"tensorrt_lean_cu13_libs=={VERSION}",
    "triton==3.9.0",
    "cuda-bindings==13.5.0",
    "cuda-pathfinder==1.9.0",
]
LIBRARIES = {"libnvinfer.so.11": "INFER", "libnvinfer_plugin.so.11": "PLUGIN", "libnvonnxparser.so.11": "PARSER"}


def main(arguments: list[str]) -> int:
    try:
        python = make(FOLDER, PACKAGES, _complete, also=stubs().read_bytes())
    except Unavailable as error:
        return skipped(f"TensorRT {VERSION}", error)
    plain = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    here = Path(__file__).parent
    tests = sorted(str(path) for pattern in ("test_tensorrt_*.py", "test_triton_*.py") for path in here.glob(pattern))
    return subprocess.run([*command, *tests], cwd=ROOT, env=plain, check=False).returncode


def stubs() -> Path:
    return Path(__file__).with_name("stubs.c")


def _complete(python: Path, packages: Path) -> None:
    _compile_stubs(packages)
    version = output(python, "import tensorrt; print(tensorrt.__version__)")
    assert version == VERSION, f"asked for TensorRT {VERSION}, got {version}"


def _compile_stubs(packages: Path) -> None:
    """Compile the stubs into the folder of the bindings, which look for libraries there first."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise SystemExit("there is no C compiler for the stub libraries; install one (apt install gcc) or set CC")
    lean = packages / "tensorrt_lean_libs"
    for name, which in LIBRARIES.items():
        command = [compiler, "-shared", "-fPIC", f"-D{which}", "-o", str(packages / "tensorrt_bindings" / name)]
        command += [str(stubs()), f"-Wl,-soname,{name}"]
        if which == "INFER":
            command += ["-Wl,--no-as-needed", f"-L{lean}", "-l:libnvinfer_lean.so.11", f"-Wl,-rpath,{lean}"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
