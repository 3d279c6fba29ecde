"""llama.cpp's server, compiled from the sources that llama-cpp-python brings, and its files of the models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.environments import RECIPES
from benchmarks.peers.process import PeerError
from examples.smollm2.__main__ import HEAD, model_folder
from examples.smollm2.sources import FOLDER
from trtspec.build.sources import digest

CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_NUMBER=0", "-DLLAMA_BUILD_COMMIT=unknown",
    "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",  # GCC 12 drops most of what _tile_loadconfig reads: AMX crashes
)  # fmt: skip
QUANTISED = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
_PART = "PART"
LLAMA = RECIPES["llama"].steps[-1][-1]


def llama_source() -> Path:
    """Return the folder of llama.cpp's sources, from llama-cpp-python's sdist.

    Its folder `packages` has what the converter imports.
    """
    folder = FOLDER / "llama.cpp"
    if not folder.is_dir():
        pip, part = [sys.executable, "-m", "pip"], FOLDER / "part.cpp"
        shutil.rmtree(part, ignore_errors=True)
        options = ["--no-deps", "--no-binary", ":all:", "-d", str(part)]
        subprocess.run([*pip, "download", "-q", *options, LLAMA], check=True)
        (sdist,) = part.glob("*.tar.gz")
        with tarfile.open(sdist) as package:
            package.extractall(part, filter="data")
        (source,) = part.glob("*/vendor/llama.cpp")
        subprocess.run([*pip, "install", "-q", "--target", str(source / "packages"), "sentencepiece"], check=True)
        source.rename(folder)
        shutil.rmtree(part)
    return folder


def server_of(source: Path, folder: Path, jobs: int, report: Callable[[str], None]) -> Path:
    """Return the folder of llama-server and llama-quantize.

    They are compiled once, which takes many minutes. PeerError if that fails.
    """
    programs = folder / "bin"
    if not (programs / "made.txt").is_file():
        report(f"llama.cpp: compiling {programs}")
        targets = ["llama-server", "llama-quantize"]
        for command in (
            ["cmake", "-S", str(source), "-B", str(folder), *CMAKE],
            ["cmake", "--build", str(folder), "-j", str(jobs), "--target", *targets],
        ):
            _run(command, folder.with_suffix(".log"))
        (programs / "made.txt").write_text("\n".join(CMAKE), encoding="utf-8")
    return programs


def files_of(source: Path, programs: Path, folder: Path, format: str, head_format: str) -> tuple[Path, Path]:
    """Return the target and the head as GGUF; llama.cpp's converter and quantiser write them unless they are there."""
    made = folder / digest(None, [model_folder(), HEAD], [])
    made.mkdir(parents=True, exist_ok=True)
    found = []
    for name, checkpoint, kind in (("target", model_folder(), format), ("head", HEAD, head_format)):
        plain = made / f"{name}-BF16.gguf"
        if not plain.is_file():
            script = [sys.executable, str(source / "convert_hf_to_gguf.py"), str(checkpoint), "--outtype", "bf16"]
            script += ["--target-model-dir", str(model_folder())] if name == "head" else []
            _make(plain, [*script, "--outfile", _PART], source / "packages")
        file = made / f"{name}-{QUANTISED[kind]}.gguf"
        if not file.is_file():
            _make(file, [str(programs / "llama-quantize"), str(plain), _PART, QUANTISED[kind]])
        found.append(file)
    return found[0], found[1]


def _make(file: Path, command: list[str], path: Path | None = None) -> None:
    """Write the file atomically: the command writes to _PART."""
    part = file.with_name("part-" + file.name)
    _run([str(part) if word == _PART else word for word in command], file.with_suffix(".log"), path)
    part.replace(file)


def _run(command: list[str], log: Path, path: Path | None = None) -> None:
    environment = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        try:
            subprocess.run(command, check=True, env=environment, stdout=output, stderr=output)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerError(f"llama.cpp: {command[0]} failed ({error.__class__.__name__}); see {log}") from error
