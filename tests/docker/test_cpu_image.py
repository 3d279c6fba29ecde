"""Dockerfile.cpu, executed step by step in a scratch root (scratch_root.py), and the server that runs there.

The tests take minutes, hence `make test-docker`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtspec import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
PROMPT = "def read_lines(path):\n    "

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


def _why_not(folder: Path) -> str | None:
    """Reason why this machine cannot run these tests, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "wants root on Linux, to mount and chroot"
    if sys.base_prefix == "/usr":
        return "wants a Python with a folder of its own, which stands in for the image's /usr/local"
    for name in ("unshare", "nsenter", "setpriv", "chroot"):
        if shutil.which(name) is None:
            return f"wants {name}"
    for name in ("lower", "upper", "work", "both"):
        (folder / name).mkdir()
    options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
    probe = f"mount -t overlay -o {options} overlay {folder}/both && unshare --net --pid --fork true"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", probe], capture_output=True, text=True, check=False)
    return f"this machine allows no mounts of its own: {done.stderr.strip()}" if done.returncode else None


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    why = _why_not(tmp_path_factory.mktemp("probe"))
    if why is not None:
        pytest.skip(why)
    scratch = tmp_path_factory.mktemp("image")
    order, engine, dockerfile = scratch / "order.json", scratch / "engine", ROOT / "docker" / "Dockerfile.cpu"
    documented = re.search(r"docker run .*--tmpfs /tmp(?::(\S+))?", dockerfile.read_text())
    assert documented is not None
    # The loader of compiled graphs unpacks them into /tmp and maps them from there.
    build = ["build", "--checkpoint_dir", str(DEMO / "target"), "--output_dir", str(engine), "--max_seq_len", "512",
             "--speculative_decoding_mode", "EAGLE3_ONE_MODEL", "--speculative_model_dir", str(DEMO / "eagle3"),
             "--max_draft_len", "3"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "trtspec", *build], check=True, capture_output=True)
    fields = {
        "dockerfile": str(dockerfile),
        "context": str(ROOT),
        "scratch": str(scratch / "stages"),
        "cache": str(ROOT / "build" / "docker-cache"),
        # this machine's index, with torch among its packages
        "build_args": {"TORCH_INDEX": os.environ.get("TORCH_INDEX", "https://pypi.org/simple")},
        "volumes": {str(engine): "/models"},
        "tmpfs": documented[1] or "noexec",
        "arguments": ["--model", "/models", "--log-format", "json"],
        "request": {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True},
    }
    order.write_text(json.dumps(fields))
    command = ["unshare", "--mount", sys.executable, "-m", "tests.docker.scratch_root", str(order)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    shutil.rmtree(scratch / "stages")  # a gigabyte or two
    assert done.returncode == 0, done.stderr[-8000:]
    report: dict[str, Any] = json.loads(done.stdout)
    print(report)
    return report


def test_it_is_healthy_and_answers_what_is_right(seen: dict[str, Any]) -> None:
    with LLM(DEMO / "target") as llm:
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert seen["answer"]["choices"][0]["text"] == output.outputs[0].text
    assert seen["answer"]["usage"]["speculation"]["drafted_tokens"] > 0


def test_it_is_nobody_and_writes_nowhere(seen: dict[str, Any]) -> None:
    assert (seen["uid"], seen["capabilities"]) == ("10001", True)
    assert seen["writable"] == ["/tmp"]


def test_it_stops_when_it_is_told_to(seen: dict[str, Any]) -> None:
    """The server stops although it is process 1, for which a signal without a handler does nothing."""
    assert seen["pid_inside"] == "1"
    assert seen["exit_status"] == 0


def test_the_compiled_kernels_run(seen: dict[str, Any]) -> None:
    assert seen["kernels"]


def test_it_holds_what_is_pinned(seen: dict[str, Any]) -> None:
    lines = (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    pinned = {_plain(line) for line in lines if not line.startswith("#")}
    held = {_plain(line) for line in seen["packages"] if "==" in line}
    assert len(held) > 30
    assert held <= pinned


def _plain(line: str) -> tuple[str, str]:
    """Normalised name and version: PyYAML==6.0+cpu -> pyyaml, 6.0."""
    name, version = line.split("==")
    return re.sub(r"[-_.]+", "-", name).lower(), version.split("+")[0]
