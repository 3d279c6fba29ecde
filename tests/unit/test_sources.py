"""The digest of an engine changes with each of its ingredients and with nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo import engines as demo
from trtspec.build import sources
from trtspec.build.sources import DIGITS, PACKAGE, build_code, digest, engine_digest, kernel_code

ROOT = Path(__file__).resolve().parents[2]


def test_a_digest_follows_settings_files_and_code(tmp_path: Path) -> None:
    checkpoint, code = tmp_path / "checkpoint", tmp_path / "code.py"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    code.write_text("a = 1")

    def now(K: int = 3) -> str:
        return digest({"K": K}, [checkpoint], [code])

    first = now()
    assert now() == first
    assert len(first) == DIGITS
    seen = {first, now(K=4)}
    (checkpoint / "config.json").write_text("{ }")
    seen.add(now())
    (checkpoint / "more").mkdir()
    (checkpoint / "more" / "weights").write_text("")
    seen.add(now())
    code.write_text("a = 2")
    seen.add(now())
    assert len(seen) == 5


def test_an_engine_s_digest_follows_its_drafts_the_machine_and_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("1")
    speculation = {"method": "draft_model", "model": str(tmp_path / "draft")}

    def now() -> list[str]:
        chosen = (None, {"method": "ngram"}, speculation)
        return [engine_digest(tmp_path / "target", one, {"max_batch_size": 8}) for one in chosen]

    first = now()
    assert len({*first, engine_digest(tmp_path / "target", None, {})}) == 4
    (tmp_path / "draft" / "weights").write_text("22")
    second = now()
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False]
    monkeypatch.setattr(sources, "load_plugins", lambda: {"cpu": "another instruction set"})
    third = now()
    monkeypatch.setattr(sources, "machine", lambda backend: {"torch": "another"})
    fourth = now()
    monkeypatch.setattr(sources, "kernel_code", lambda: [])
    assert all(len(set(column)) == 4 for column in zip(second, third, fourth, now(), strict=True))


def test_the_code_is_all_that_compiling_and_packing_import() -> None:
    """The code in a digest is all that compiling and packing import.

    The exceptions are errors, memory and the search for checkpoints, which change nothing of an engine.
    """
    modules = ["build.build", "backends.aoti.compile"]
    files = [file.relative_to(PACKAGE) for file in (PACKAGE / "methods").rglob("*.py") if file.name != "train.py"]
    methods = [".".join(file.with_suffix("").parts) for file in files if file.name != "__init__.py"]
    reached = set(imported([f"trtspec.{name}" for name in (*modules, *methods)]))
    assert len(reached) > 30
    assert {file for file in reached - set(build_code()) if file.parent.name != "hub"} <= {
        PACKAGE / "errors.py",
        PACKAGE / "kv" / "memory.py",
        PACKAGE / "kv" / "pool.py",
    }
    names = {file.relative_to(PACKAGE).as_posix() for file in build_code()}
    assert {"methods/step.py", "core.py", "build/build.py"} <= names
    assert not {"build/wiring.py", "build/gpu_plan.py", "engine/step.py", "llm.py", "cli/build.py"} & names
    assert all(file.is_file() for file in build_code())


def test_a_module_that_is_gone_is_no_root() -> None:
    with pytest.raises(AssertionError, match="no such modules"):
        list(imported(["trtspec.build.build", "trtspec.build.gone"]))


def test_kernels_are_found_where_they_are_installed() -> None:
    assert {"build.py", "linear.h", "op_linear.cpp"} <= {file.name for file in kernel_code()}


def test_the_demo_s_engines_are_made_of_their_own_draft_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").write_text("1")
    monkeypatch.setitem(demo.ENGINES, "draft", {**(demo.ENGINES["draft"] or {}), "model": str(tmp_path)})
    first = [demo.folder_of(name) for name in demo.ENGINES]
    (tmp_path / "weights").write_text("22")
    second = [demo.folder_of(name) for name in demo.ENGINES]
    assert [name for name, a, b in zip(demo.ENGINES, first, second, strict=True) if a != b] == ["draft"]


def file_of(module: str) -> Path | None:
    """File of a module, or None for a name inside a module."""
    stem = ROOT.joinpath(*module.split("."))
    return next((one for one in (stem.with_suffix(".py"), stem / "__init__.py") if one.is_file()), None)


def imported(modules: list[str]) -> Iterator[Path]:
    """Yield the files of these modules of the package, and of all that they import from it, directly or not."""
    assert [name for name in modules if file_of(name) is None] == [], "no such modules"
    seen, waiting = set(), list(modules)
    while waiting:
        file = file_of(waiting.pop())
        if file is None or file in seen or not file.is_relative_to(PACKAGE):
            continue
        seen.add(file)
        yield file
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                waiting += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
