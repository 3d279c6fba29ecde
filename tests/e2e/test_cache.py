"""Checkpoints that start from the engines that a cache keeps.

The tests show what is compiled and when, and which message says that it cannot be.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cached import LIMITS, Warm, ended, ids, runs, start
from tests.serve.server import running
from trtspec import LLM
from trtspec.build import start as starting
from trtspec.build.cache import Cache
from trtspec.errors import CapacityError, CheckpointError, ConfigError, DependencyError

OP_BY_OP = "runs op by op and slower, not as a compiled engine"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def eager_ids(model: Path, **options: Any) -> list[int]:
    with LLM(model, backend="eager", **LIMITS, **options) as llm:
        return ids(llm)


def copying(monkeypatch: pytest.MonkeyPatch, engine: Path, before: Callable[[], object] = lambda: None) -> list[Path]:
    """Let "compiling" copy a finished engine. Returns the list of folders that were made so.

    before: called before each copy.
    """
    made: list[Path] = []

    def build(checkpoint: Path, output: Path, *rest: Any, **options: Any) -> None:
        before()
        shutil.copytree(engine, output)
        made.append(output)

    monkeypatch.setattr(starting, "build_engine", build)
    return made


@pytest.fixture
def cache(warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A copy of the warm cache, for this process and its children."""
    found = warm.copied(tmp_path / "cache")
    monkeypatch.setenv("TRTSPEC_CACHE", str(found.folder))
    return found


# -- starts -----------------------------------------------------------------------------------------------------------


def test_two_processes_at_once_compile_once(warm: Warm) -> None:
    builder, other = sorted(warm.first, key=lambda one: -one.times(" in "))
    assert (builder.times("INFO compiling"), builder.times("INFO compiled")) == (1, 1)
    assert (other.times("INFO compiling"), other.times("INFO compiled")) == (0, 0)
    assert other.times("compiles this engine; waiting for it") == 1
    assert "INFO process " in other.log
    assert [one.said["runs"] for one in warm.first] == ["AotiExecutable"] * 2
    assert builder.said["ids"] == other.said["ids"] == eager_ids(warm.model)
    assert f"(once; kept in {warm.folder})" in builder.log


def test_a_second_start_compiles_nothing_and_imports_no_compiler(warm: Warm) -> None:
    again = ended(start(warm.model, warm.folder))
    assert again.said == {"ids": warm.first[0].said["ids"], "runs": "AotiExecutable", "compilers": []}
    assert "compil" not in again.log


@pytest.mark.parametrize(
    ("speculation", "options"),
    [
        (None, {"max_batch_size": 2, "max_seq_len": 100, "enable_prefix_caching": False, "num_kv_blocks": 40}),
        (None, {"backend": "aoti", **LIMITS}),
        (NGRAM, LIMITS),
        ({"method": "suffix", "num_speculative_tokens": 2}, LIMITS),
    ],
    ids=["limits", "aoti", "ngram", "suffix"],
)
def test_limits_and_drafters_of_the_host_share_one_engine(
    warm: Warm,
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    speculation: dict[str, Any] | None,
    options: dict[str, Any],
) -> None:
    made = copying(monkeypatch, warm.folder / warm.key)
    with LLM(warm.model, speculation, **options) as llm:
        assert ids(llm) == warm.first[0].said["ids"]
        assert llm.engine.max_seq_len == options.get("max_seq_len", 512)
        assert [kept.in_use for kept in cache.kept()] == [True]
    assert [kept.in_use for kept in cache.kept()] == [False]
    assert not made


def test_the_server_starts_from_the_cache(warm: Warm, cache: Cache, tmp_path: Path) -> None:
    with running(warm.model, tmp_path / "log", options=["--num-kv-blocks", "64"]):
        assert [kept.in_use for kept in cache.kept()] == [True]
    assert OP_BY_OP not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"block_size": 32}], ids=str)
def test_what_graphs_depend_on_is_another_engine(
    warm: Warm,
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    made = copying(monkeypatch, warm.folder / warm.key)
    LLM(warm.model, **LIMITS, **options).shutdown()
    assert len(made) == 1
    assert len(cache.kept()) == 2


# -- changes of a checkpoint ------------------------------------------------------------------------------------------


def rewritten(file: Path) -> None:
    """Change one byte of the last tensor, in place, and restore the file's times."""
    before = file.stat()
    with file.open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        last = weights.read(1)[0]
        weights.seek(-1, os.SEEK_END)
        weights.write(bytes([last ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: rewritten(model / "model.safetensors"),
        lambda model: (model / "config.json").write_text((model / "config.json").read_text() + "\n"),
        lambda model: (model / "tokenizer.json").unlink(),
    ],
    ids=["weights", "config", "tokenizer"],
)
def test_a_changed_checkpoint_is_compiled_anew(
    warm: Warm,
    cache: Cache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], object],
) -> None:
    model = shutil.copytree(warm.model, tmp_path / "model")
    made = copying(monkeypatch, warm.folder / warm.key)
    LLM(model, **LIMITS).shutdown()
    assert not made  # the same bytes in another folder
    change(model)
    LLM(model, **LIMITS).shutdown()
    assert len(made) == 1
    assert len(cache.kept()) == 2


def test_a_checkpoint_that_changes_meanwhile_is_not_kept(
    warm: Warm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shutil.copytree(warm.model, tmp_path / "model")
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    copying(monkeypatch, warm.folder / warm.key, lambda: rewritten(model / "model.safetensors"))
    with pytest.raises(CheckpointError, match="changed while it was compiled; start again"):
        LLM(model, **LIMITS)
    assert Cache(tmp_path / "cache", 1).kept() == []
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_what_is_wrong_surfaces_before_anything_is_compiled(
    warm: Warm,
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = copying(monkeypatch, warm.folder / warm.key)
    for options, why in (
        ({"max_seq_len": 9999}, "exceeds the checkpoint's"),
        ({"speculative_config": {**NGRAM, "num_speculative_tokens": 9999}}, "num_speculative_tokens"),
        ({"max_num_tokens": 1}, "cannot hold"),
        ({"kv_cache_memory": 1, "num_kv_blocks": None, "block_size": 8}, "less than two KV blocks"),
    ):
        with pytest.raises((ConfigError, CapacityError), match=why):
            LLM(warm.model, **{**LIMITS, **options})
    assert not made


# -- damage -----------------------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def blanked(file: Path) -> None:
    with file.open("r+b") as graph:
        graph.seek(-200, os.SEEK_END)
        graph.write(bytes(200))


@pytest.mark.parametrize(
    "harm",
    [
        lambda engine: cut(next(engine.glob("target/*.pt2"))),
        lambda engine: blanked(next(engine.glob("target/*.pt2"))),
        lambda engine: next(engine.glob("target/*.safetensors")).unlink(),
        lambda engine: (engine / "config.json").write_text("{"),
        lambda engine: (engine / ".lock").unlink(),
    ],
    ids=["cut", "blanked", "missing", "config", "lock"],
)
def test_a_damaged_engine_is_built_again(
    warm: Warm,
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], object],
) -> None:
    harm(cache.folder / warm.key)
    made = copying(monkeypatch, warm.folder / warm.key)
    with LLM(warm.model, **LIMITS) as llm:
        assert ids(llm) == warm.first[0].said["ids"]
    assert len(made) == 1
    assert [record.message.endswith("; it is compiled anew") for record in caplog.records] == [True]
    LLM(warm.model, **LIMITS).shutdown()
    assert len(made) == 1


def test_a_killed_build_leaves_what_the_next_one_removes(warm: Warm, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    process = start(warm.model, folder)
    try:
        while not (left := [*folder.glob("building-*/.engine-*")]):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert left[0].is_dir()
    cache = Cache(folder, 10**9)
    assert cache.kept() == []
    for key in (warm.key, "0" * 24):  # the key of the killed build is free again, too
        cache.get(key, {}, lambda output: shutil.copytree(warm.folder / warm.key, output)).release()
        assert not [*folder.glob("building-*")]
    assert len(cache.kept()) == 2


# -- owners and permissions -------------------------------------------------------------------------------------------


def foreign(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, -1)


def linked(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize("which", ["cache", "entry"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (foreign, "belongs to user 12345, .* set TRTSPEC_CACHE to a folder of your own"),
        (lambda folder: folder.chmod(0o755), r"is open to others \(mode 0755\), .* chmod 700 "),
        (lambda folder: folder.chmod(0o720), r"is open to others \(mode 0720\)"),
        (linked, "is a link, .*; remove it, or set TRTSPEC_CACHE"),
    ],
    ids=["foreign", "0755", "0720", "link"],
)
def test_a_folder_that_others_can_write_is_refused(
    warm: Warm,
    cache: Cache,
    which: str,
    change: Callable[[Path], object],
    why: str,
) -> None:
    change(cache.folder if which == "cache" else cache.folder / warm.key)
    for backend in ("auto", "aoti"):
        with pytest.raises(ConfigError, match=f"holds code that is run; |{why}") as refused:
            LLM(warm.model, backend=backend, **LIMITS)
        assert refused.match(why)


def test_what_is_made_is_ours_alone(warm: Warm) -> None:
    for path in (warm.folder, warm.folder / warm.key):
        assert path.stat().st_mode & 0o777 == 0o700


# -- without a compiler, a disk, a cache ------------------------------------------------------------------------------


def test_without_a_compiler_it_works_and_says_so(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bin").mkdir()
    for name, value in {"TRTSPEC_CACHE": str(tmp_path / "cache"), "PATH": str(tmp_path / "bin"), "CXX": "g++"}.items():
        monkeypatch.setenv(name, value)
    with LLM(warm.model, **LIMITS) as llm:
        assert runs(llm) == "EagerExecutable"
        assert ids(llm) == warm.first[0].said["ids"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"{warm.model} {OP_BY_OP}: there is no C++ compiler; install g++ (apt install g++) or set CXX"
    ]
    with pytest.raises(DependencyError, match=r"install g\+\+ \(apt install g\+\+\) or set CXX"):
        LLM(warm.model, backend="aoti", **LIMITS)


@pytest.mark.long
def test_a_full_disk_leaves_nothing_and_is_said(warm: Warm, small_disk: Path) -> None:
    both = [start(warm.model, small_disk / "cache", options) for options in ({}, {"backend": "aoti"})]
    eager, refused = map(ended, both)
    assert (eager.said["runs"], eager.said["ids"]) == ("EagerExecutable", warm.first[0].said["ids"])
    assert eager.times("WARNING") == eager.times(f"WARNING {warm.model} {OP_BY_OP}: the disk of ") == 1
    assert "GB free, and the engine takes 0.1" in eager.log
    assert refused.said["error"] == "CapacityError"
    assert "; make room, set TRTSPEC_CACHE to a folder with more" in refused.said["message"]
    assert not [path for path in (small_disk / "cache").iterdir() if path.is_dir()]


def test_off_is_op_by_op_and_no_loss_worth_a_warning(
    warm: Warm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", "off")
    with caplog.at_level(logging.INFO), LLM(warm.model, **LIMITS) as llm:
        assert ids(llm) == warm.first[0].said["ids"]
    (said,) = [record for record in caplog.records if OP_BY_OP in record.message]
    assert (said.levelname, said.message.partition(": ")[2]) == ("INFO", "TRTSPEC_CACHE=off keeps none; unset it")
    with pytest.raises(ConfigError, match="unset it, or build an engine first: trtspec build"):
        LLM(warm.model, backend="aoti", **LIMITS)


def test_without_kernels_it_works_and_says_so(warm: Warm, tmp_path: Path) -> None:
    said = ended(start(warm.model, tmp_path / "cache", TRTSPEC_PLUGINS="0"))
    assert (said.said["runs"], said.said["ids"]) == ("EagerExecutable", warm.first[0].said["ids"])
    assert f"{OP_BY_OP}: the C++ kernels do not serve; run python -m trtspec_plugins.cpu" in said.log
