"""A checkpoint whose engine two processes want at once, one of which compiles it; and copies of their cache."""

from __future__ import annotations

import io
import json
import logging
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
from trtspec import LLM, SamplingParams
from trtspec.build.cache import Cache

LIMITS = {"max_batch_size": 4, "num_kv_blocks": 64}
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
    """What a process that started an engine told: its log, and in `said` the JSON of SCRIPT."""

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


def ids(llm: LLM) -> list[int]:
    """The ids that SCRIPT generates."""
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    return list(output.outputs[0].token_ids)


def runs(llm: LLM) -> str:
    """The name of the class that runs the target."""
    executable: Any = llm.engine.executables[0]
    return type(executable.inner).__name__


def start_here(model: Path, cache: Path) -> Started:
    """Start the engine in this process, where the compiler may be loaded already."""
    log = io.StringIO()
    logger, handler = logging.getLogger("trtspec"), logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRTSPEC_CACHE", str(cache))
            with LLM(model, **LIMITS) as llm:
                said = {"ids": ids(llm), "runs": runs(llm)}
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    return Started(log.getvalue(), said)


@dataclass(frozen=True)
class Warm:
    """A checkpoint, a cache that has its engine, and what this process and another told that wanted it at once."""

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
    other = start(model, folder / "cache")
    return Warm(model, folder / "cache", (start_here(model, folder / "cache"), ended(other)))


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
