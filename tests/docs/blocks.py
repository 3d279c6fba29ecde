"""Runs the code blocks of a Markdown page in their order, as a reader would who copies them.

The Python blocks of a page share one namespace. Each shell block is a script of its own. All run in a scratch folder,
in which `examples` is the repository's. A server that a block leaves in the background lives until the page's end. A
block after a comment `<!-- not run: REASON -->` is only checked for its syntax; REASONS lists the reasons that are
accepted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

REASONS = (
    "needs a GPU",
    "needs Docker",
    "needs a Triton Inference Server",
    "needs TensorRT-RTX",
    "needs a network",
    "takes minutes",
    "a pattern, not a program",
)
"""Reasons for not running a block."""

TIMEOUT_S = 300.0

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]*?) -->\s*$")


class Block(NamedTuple):
    """A fenced block: the line of its fence, its language, its code, and why it is not run ("" = it is)."""

    line: int
    language: str
    code: str
    not_run: str


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced code blocks of a page. AssertionError for one that is not run without an accepted reason."""
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        said = _NOT_RUN.search(text, 0, found.start())
        reason = "" if said is None else said["reason"]
        assert not reason or reason.startswith(REASONS), f"line {line}: no accepted reason: {reason!r}"
        indent = len(found["indent"])
        code = "".join(line[indent:] for line in found["code"].splitlines(keepends=True))
        yield Block(line, found["language"], code, reason)


def run_page(page: Path, folder: Path) -> int:
    """Run the blocks of a page as run_blocks does."""
    return run_blocks(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)), folder)


def run_blocks(text: str, name: str, folder: Path) -> int:
    """Run the blocks of a page in `folder`, which is empty, and return the number of blocks that ran.

    AssertionError names the line of a block that failed.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TRTSPEC_CACHE": "off",
        "HF_HUB_OFFLINE": "1",
    }
    python: _Python | None = None
    groups: list[int] = []
    ran = 0
    try:
        for block in blocks_of(text):
            where = f"{name}:{block.line}"
            if block.not_run:
                _look_at(block, where)
                continue
            ran += 1
            if block.language == "python":
                if python is None:
                    python = _Python(folder, environment)
                    groups.append(python.process.pid)
                python.run(block.code, where)
            elif block.language == "bash":
                _run(["bash", "-euo", "pipefail", "-c", block.code], folder, environment, where, groups)
            elif block.language == "json":
                json.loads(block.code)
            elif block.language == "yaml":
                yaml.safe_load(block.code)
            else:
                assert block.language in ("text", "ebnf"), f"{where}: a block of {block.language!r}: say what it is"
                ran -= 1
    finally:
        for group in groups:
            _end(group)
    return ran


def _look_at(block: Block, where: str) -> None:
    """Check a block that is not run: its syntax, and that the make targets it names exist."""
    if block.language == "python":
        compile(block.code, where, "exec")
    elif block.language == "bash":
        checked = subprocess.run(["bash", "-n", "-c", block.code], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, f"{where}: {checked.stderr}"
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in re.findall(r"^make ([a-z][\w-]*)", block.code, re.MULTILINE):
            assert re.search(rf"^{target}(?: [\w-]+)*:", makefile, re.MULTILINE), (
                f"{where}: there is no `make {target}`"
            )


class _Python:
    """A Python process in which the blocks of a page run, one after another."""

    _LOOP = (
        "import json, sys, traceback\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        "        exec(compile(json.loads(line), 'block', 'exec'), globals())\n"
        "        said = 'ran'\n"
        "    except BaseException:\n"
        "        said = 'failed'\n"
        "        traceback.print_exc()\n"
        "    print('\\n<<' + said + '>>', flush=True)\n"
    )

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self._LOOP],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )

    def run(self, code: str, where: str) -> None:
        """Run a block of code. AssertionError if it raises or ends the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        printed: list[str] = []
        for line in self.process.stdout:
            if line in ("<<ran>>\n", "<<failed>>\n"):
                break
            printed.append(line)
        else:
            line = "ended"
        assert line == "<<ran>>\n", f"{where}: {line.strip()}\n{''.join(printed)[-4000:]}"


def _run(command: list[str], folder: Path, environment: dict[str, str], where: str, groups: list[int]) -> None:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        started = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        groups.append(started.pid)
        try:
            code: Any = started.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = f"none after {TIMEOUT_S:.0f} s"
        output.seek(0)
        assert code == 0, f"{where}: exit status {code}\n{output.read()[-4000:]}"


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGTERM)
    except ProcessLookupError:
        return
