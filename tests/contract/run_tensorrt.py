"""Run the contract tests against TensorRT's real Python bindings, on a machine without a GPU (make contract-tensorrt).

The bindings and the lean runtime come from the package registry, into a venv of their own under build/; torch and the
tools come from the Python that runs this script. What the bindings link to and the registry does not have without a
GPU's driver, libnvinfer, libnvinfer_plugin and libnvonnxparser, is compiled from stubs.c: enough for the plugin
registry, the plugin classes and every declaration of the API, not for a builder or an engine.

Where the packages cannot be had it says so and exits with 0; once they are there, whatever fails is a failure.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


class Unavailable(Exception):
    """The packages cannot be had here."""


def main(arguments: list[str]) -> int:
    try:
        python = environment()
    except Unavailable as error:
        line = "!" * 100
        print(f"{line}\nSKIPPED: nothing was checked against TensorRT {VERSION}: {error}\n{line}", flush=True)
        return 0
    plain = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run([*command, "tests/contract"], cwd=ROOT, env=plain, check=False).returncode


def environment() -> Path:
    """The Python of a venv with the packages and the stubs; made once per version of all of it."""
    python = FOLDER / "bin" / "python"
    stamp = FOLDER / "made-of"
    made_of = hashlib.sha256(repr((PACKAGES, sys.executable)).encode() + stubs().read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_of:
        return python
    if FOLDER.exists():
        shutil.rmtree(FOLDER)
    venv.create(FOLDER, with_pip=False, symlinks=True)
    packages = Path(_output(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    lender = sysconfig.get_path("purelib")
    (packages / "lent.pth").write_text(f"import site; site.addsitedir({lender!r})\n", encoding="utf-8")
    print(f"installing TensorRT's bindings into {FOLDER.relative_to(ROOT)} (torch is not downloaded again)", flush=True)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*install, "--no-deps", *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise Unavailable(f"pip could not install {', '.join(PACKAGES)}: {' '.join(said[-2:]) or 'no reason given'}")
    _compile_stubs(packages)
    version = _output(python, "import tensorrt; print(tensorrt.__version__)")
    assert version == VERSION, f"asked for TensorRT {VERSION}, got {version}"
    stamp.write_text(made_of, encoding="utf-8")
    return python


def stubs() -> Path:
    return Path(__file__).with_name("stubs.c")


def _compile_stubs(packages: Path) -> None:
    """Beside the bindings, which look for libraries there first."""
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


def _output(python: Path, code: str) -> str:
    done = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
