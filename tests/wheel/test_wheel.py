"""The wheel and the sdist, installed into bare venvs with the packages that pip brings, and run outside the checkout.

The tests take minutes, hence `make test-wheel`. TRTSPEC_WHEEL_TORCH=2.15.0 installs that torch instead of the pinned
one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from build_scripts import build_wheel

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "examples" / "demo" / "target"
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
TORCH = os.environ.get("TRTSPEC_WHEEL_TORCH") or PINNED["torch"]
LOADED = "import logging; logging.basicConfig(); from trtspec.ops import load_plugins; print(load_plugins())"
GENERATE = ("generate", str(TARGET), "--prompt", "def read_lines(path):\n    ", "--temperature", "0")
ROUNDS = 3

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(3600)]


class Installed:
    """A Python with packages, and a folder to run in."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder

    def run(self, *command: str | Path, **environment: str) -> str:
        """Output of `python *command`, stderr included, in an environment without our variables."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRTSPEC_", "PYTHON"))}
        done = subprocess.run(
            [self.python, *command],
            cwd=self.folder,
            env=kept | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def trtspec(self, *arguments: str | Path) -> str:
        return self.run("-m", "trtspec", *arguments)

    def tokens_per_second(self, engine: Path) -> float:
        result = self.folder / "bench.json"
        self.trtspec("bench", "decode", engine, "--output-len", "256", "--repeats", "3", "--json", result)
        return float(json.loads(result.read_text(encoding="utf-8"))["tok_s"])


def bare(folder: Path, *packages: str | Path) -> Installed:
    """Return a new venv with packages and all their requirements."""
    venv.create(folder / "venv", with_pip=True)
    installed = Installed(folder / "venv" / "bin" / "python", folder)
    installed.run("-m", "pip", "install", "-q", *packages)
    return installed


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build_wheel.build(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [wheel] = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    [sdist] = dist.glob("*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in a bare venv."""
    return bare(tmp_path_factory.mktemp("installed"), f"torch=={TORCH}", wheel)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(Path(sys.executable), tmp_path_factory.mktemp("checkout"))


def test_the_wheel_has_all_kernels_and_wants_nothing_unstable(wheel: Path) -> None:
    print(f"\n{wheel.name}")
    assert build_wheel.complaints(wheel) == []


def test_the_wheels_kernels_load(installed: Installed, checkout: Installed) -> None:
    where = "import torch, trtspec_plugins.cpu as cpu; print(torch.__version__, cpu.__file__)"
    version, file = installed.run("-c", where).split()
    assert version.split("+")[0] == TORCH
    assert Path(file).is_relative_to(installed.folder)
    assert installed.run("-c", LOADED) == checkout.run("-c", LOADED)
    assert "cpu" in installed.run("-c", LOADED)


def test_the_wheel_generates_the_checkouts_text(installed: Installed, checkout: Installed) -> None:
    text = installed.trtspec(*GENERATE, "--max-tokens", "32")
    assert len(text) > 32
    assert text == checkout.trtspec(*GENERATE, "--max-tokens", "32")


def test_a_compiled_engine_is_as_fast_as_the_checkouts(installed: Installed, checkout: Installed) -> None:
    speeds: dict[str, list[float]] = {"wheel": [], "checkout": []}
    both = {"wheel": (installed, installed.folder / "engine"), "checkout": (checkout, checkout.folder / "engine")}
    for python, engine in both.values():
        python.trtspec("build", TARGET, "--output_dir", engine, "--max_batch_size", "1", "--max_seq_len", "512")
    for _ in range(ROUNDS):
        for name, (python, engine) in both.items():
            speeds[name].append(python.tokens_per_second(engine))
    print(f"\ncompiled engine, tokens/s, torch {TORCH}:", {name: [round(s) for s in of] for name, of in speeds.items()})
    assert max(speeds["wheel"]) > 0.8 * max(speeds["checkout"])  # leaves room for other work of the machine


def test_the_sdist_compiles_its_kernels_where_there_is_a_compiler(sdist: Path, installed: Installed) -> None:
    """pip builds the sdist in an environment of its own, for which the backend asks for torch."""
    constraint = installed.folder / "constraint.txt"
    constraint.write_text(f"torch=={TORCH}\n", encoding="utf-8")
    install = ("-m", "pip", "install", "-v", "--force-reinstall", "--no-deps", sdist)
    said = installed.run(*install, PIP_CONSTRAINT=str(constraint))
    assert "compiled kernels for" in said
    assert "{'cpu': " in installed.run("-c", LOADED)


def test_without_a_compiler_the_sdist_installs_and_says_what_is_missing(
    sdist: Path, installed: Installed, tmp_path: Path
) -> None:
    """Afterwards, a compiler and one command add the kernels."""
    without = {"PATH": str(tmp_path), "CXX": ""}
    said = installed.run("-m", "pip", "install", "-v", "--force-reinstall", "--no-deps", sdist, **without)
    assert "compiled kernels for" not in said
    assert "installed without its C++ kernels and will be slow: there is no C++ compiler; install g++" in said
    [line, loaded] = installed.run("-c", LOADED, **without).splitlines()
    assert line.endswith("the reference kernels do: not built for this version; run python -m trtspec_plugins.cpu")
    assert loaded == "{}"
    assert len(installed.run("-m", "trtspec", *GENERATE, "--max-tokens", "4", **without)) > 4
    assert "there is no C++ compiler; install g++" in installed.run(
        "-c", "import trtspec_plugins.cpu.build as build; build.main()", **without
    )
    installed.run("-m", "trtspec_plugins.cpu")
    assert "{'cpu': " in installed.run("-c", LOADED)
