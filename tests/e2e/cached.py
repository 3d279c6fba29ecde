"""A checkpoint whose engine two processes, started at once, compile together; and copies of their cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import add_tokenizer, make_target
from trtspec.build.cache import Cache

SCRIPT = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from trtspec import LLM, SamplingParams
from trtspec.errors import TrtSpecError
try:
    llm = LLM(sys.argv[1], max_batch_size=4, num_kv_blocks=64, **json.loads(sys.argv[2]))
except TrtSpecError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
    sys.exit()
(output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
print(json.dumps({
    "ids": list(output.outputs[0].token_ids),
    "runs": type(llm.engine.executables[0].inner).__name__,
    "compilers": sorted({"torch._inductor", "torch._dynamo"} & set(sys.modules)),
}))
"""


@dataclass
class Started:
    """Output of a process that started an engine: its log on stderr, and in `said` the JSON of SCRIPT."""

    log: str
    said: dict[str, Any] = field(default_factory=dict)

    def times(self, words: str) -> int:
        return self.log.count(words)


def start(
    model: Path, cache: str | Path, options: dict[str, Any] | None = None, **variables: str
) -> subprocess.Popen[str]:
    """Start a process that runs SCRIPT."""
    environment = {**os.environ, "TRTSPEC_CACHE": str(cache), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", SCRIPT, str(model), json.dumps(options or {})]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def ended(process: subprocess.Popen[str]) -> Started:
    """Wait for the process and return its output. AssertionError unless its exit status is 0."""
    out, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    return Started(log, json.loads(out.splitlines()[-1]))


@dataclass(frozen=True)
class Warm:
    """A checkpoint, a cache that has its engine, and the outputs of the two processes that compiled the engine."""

    model: Path
    folder: Path
    first: tuple[Started, Started]

    @property
    def key(self) -> str:
        (kept,) = Cache(self.folder, 10**9).kept()
        return kept.path.name

    def copied(self, folder: Path) -> Cache:
        """Copy the cache to `folder`, so that a test may change it."""
        shutil.copytree(self.folder, folder)
        return Cache(folder, 10**9)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    folder = tmp_path_factory.mktemp("cached")
    model = make_target(folder, num_hidden_layers=1)
    add_tokenizer(model)
    both = [start(model, folder / "cache") for _ in range(2)]
    first, second = (ended(process) for process in both)
    return Warm(model, folder / "cache", (first, second))


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of its own.

    Its size is the fixture's parameter. Without one, the disk has room for a few files, but too few bytes for an
    engine.
    """
    disk, size = tmp_path / "disk", getattr(request, "param", "64k")
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
