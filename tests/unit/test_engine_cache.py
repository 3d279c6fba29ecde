"""The cache of engines as files: eviction, shared files, and what the cache remembers. Nothing is compiled here."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from trtspec.backends.table import USUAL_COMPILER
from trtspec.build.cache import Cache
from trtspec.build.cache_key import Digests, compiler
from trtspec.build.engine_folder import FORMAT, file_facts, machine
from trtspec.cli import main
from trtspec.errors import ConfigError
from trtspec.hub.file_lock import FileLock

KEYS = [str(i) * 24 for i in range(4)]
WEIGHTS, GRAPHS = bytes(1000), bytes(10)


def build(folder: Path) -> None:
    """Write what a compiler would leave: weights equal to those of every engine, and graphs of its own."""
    (folder / "target").mkdir(parents=True)
    (folder / "target" / "weights.safetensors").write_bytes(WEIGHTS)
    (folder / "target" / "ragged.pt2").write_bytes(GRAPHS)
    data = {
        "trtspec_engine": FORMAT,
        "machine": machine(USUAL_COMPILER),
        "build_config": {"backend": USUAL_COMPILER},
        "executables": {},
        "files": file_facts(folder),
    }
    (folder / "config.json").write_text(json.dumps(data))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    found = Cache(tmp_path / "cache", 10**9)
    found.open()
    return found


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first_and_none_in_use(cache: Cache) -> None:
    for age, key in enumerate(KEYS):  # the first was used last
        cache.get(key, {"model": key}, build).release()
        os.utime(cache.folder / key / ".lock", (1e9 - age, 1e9 - age))
    assert [kept.facts["model"] for kept in cache.kept()] == KEYS[::-1]
    using = cache.held(KEYS[3])
    assert using is not None
    assert cache.kept()[-1].path.name == KEYS[3]  # now it is the last one used
    os.utime(cache.folder / KEYS[3] / ".lock", (1e8, 1e8))
    assert [kept.in_use for kept in cache.kept()] == [True, False, False, False]
    assert names(cache.evict(cache.size() - 1)) == [KEYS[2]]
    assert names(cache.evict(cache.kept()[0].size)) == [KEYS[1], KEYS[0]]
    assert cache.evict(0) == []  # an engine in use stays, however large it is
    using.release()
    assert names(cache.evict(0)) == [KEYS[3]]
    assert cache.size() == 0


def test_an_engine_larger_than_the_bound_stays_until_the_next_is_built(cache: Cache) -> None:
    small = Cache(cache.folder, 1)
    first = small.get(KEYS[0], {}, build)
    assert names([kept.path for kept in small.kept()]) == [KEYS[0]]
    first.release()
    small.get(KEYS[1], {}, build).release()
    assert names([kept.path for kept in small.kept()]) == [KEYS[1]]


def test_equal_weights_are_one_file_and_count_once(cache: Cache) -> None:
    for key in KEYS:
        cache.get(key, {}, build).release()
    assert len({(cache.folder / key / "target" / "weights.safetensors").stat().st_ino for key in KEYS}) == 1
    assert len({(cache.folder / key / "target" / "ragged.pt2").stat().st_ino for key in KEYS}) == len(KEYS)
    assert sum(kept.size for kept in cache.kept()) - cache.size() == (len(KEYS) - 1) * len(WEIGHTS)
    cache.evict(cache.size() - 1)
    (cache.folder / KEYS[3] / "target" / "weights.safetensors").read_bytes()  # the other engines still have it
    held = cache.held(KEYS[3])
    assert held is not None
    held.engine.verify()


def test_a_file_that_is_no_longer_what_it_was_is_shared_with_nobody(cache: Cache) -> None:
    cache.get(KEYS[0], {}, build).release()
    older = cache.folder / KEYS[0] / "target" / "weights.safetensors"
    older.write_bytes(bytes(999) + b"x")
    cache.get(KEYS[1], {}, build).release()
    assert (cache.folder / KEYS[1] / "target" / "weights.safetensors").read_bytes() == WEIGHTS


def test_what_a_build_raises_goes_on_and_leaves_nothing(cache: Cache) -> None:
    def half(folder: Path) -> None:
        build(folder)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        cache.get(KEYS[0], {}, half)
    assert names([path for path in cache.folder.iterdir() if path.is_dir()]) == []
    cache.get(KEYS[0], {}, build).release()


@pytest.mark.parametrize("size", ["0", "-1", "many", "nan", "inf", "1e300"])
def test_a_bound_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", "somewhere")
    monkeypatch.setenv("TRTSPEC_CACHE_GB", size)
    with pytest.raises(ConfigError, match=f"TRTSPEC_CACHE_GB = '{size}' is no size; set it to gigabytes, such as 20"):
        Cache.of_environment()


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variables, folder, limit in (
        ({}, tmp_path / "home" / ".cache" / "trtspec", 20e9),
        ({"XDG_CACHE_HOME": str(tmp_path / "x")}, tmp_path / "x" / "trtspec", 20e9),
        ({"TRTSPEC_CACHE": "~/mine", "TRTSPEC_CACHE_GB": "0.5"}, tmp_path / "home" / "mine", 5e8),
    ):
        for name in ("TRTSPEC_CACHE", "TRTSPEC_CACHE_GB", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert Cache.of_environment() == Cache(folder, int(limit))
    monkeypatch.setenv("TRTSPEC_CACHE", "off")
    assert Cache.of_environment() is None


def test_without_a_home_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache without a home folder cannot be used, as in a container that runs as a user without a name."""
    for name in ("HOME", "TRTSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(FileNotFoundError, match=r"~/.cache: Could not determine home directory"):
        Cache.of_environment()


def test_the_command_lists_prunes_and_clears(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(cache.folder))
    monkeypatch.setenv("COLUMNS", "200")
    modes = ("NGRAM", "EAGLE3_ONE_MODEL")
    for key, mode in zip(KEYS, modes, strict=False):
        facts = {"model": f"/models/{mode}", "options": {"dtype": "bfloat16", "quantization": None}}
        drafted = {"mode": mode, "draft_lens": [0, 3]} if mode != "NGRAM" else None
        cache.get(key, {**facts, "speculation": drafted}, build).release()
    used = cache.held(KEYS[1])
    assert used is not None
    assert main(["cache", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0] == f"{cache.folder}: 0.00 GB of 20.00 GB"
    row, other = (next(line.split() for line in listed if f"/models/{mode}" in line) for mode in reversed(modes))
    assert row[1:8] == ["EAGLE3_ONE_MODEL,", "K", "=", "0,", "3", "dtype", "bfloat16"]
    assert (row[-1], other[-1], other[1]) == ("yes", "no", "plain,")
    assert main(["cache", "prune"]) == 0
    assert "0 removed, 2 left, 1 of them in use" in capsys.readouterr().out
    for size in ("-1.0", "inf", "nan", "1e+300"):
        assert main(["cache", "prune", "--gb", size]) == 1
        assert f"--gb {size} is no size; give gigabytes, 0 or more" in capsys.readouterr().err
    assert main(["cache", "clear"]) == 0
    assert "1 removed, 1 left, 1 of them in use" in capsys.readouterr().out
    used.release()
    assert main(["cache", "prune", "--gb", "0"]) == 0
    assert "1 removed, 0 left, 0 of them in use" in capsys.readouterr().out
    monkeypatch.setenv("TRTSPEC_CACHE", "off")
    assert main(["cache", "list"]) == 1
    assert "TRTSPEC_CACHE=off keeps no engines; unset it" in capsys.readouterr().err


# -- what is remembered -----------------------------------------------------------------------------------------------


def aged(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_digests_are_remembered_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, index, read = aged(tmp_path / "a", "one"), tmp_path / "index.json", []

    def counted(path: Path) -> str:
        read.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr("trtspec.build.cache_key.sha256", counted)
    later = time.time() + 60
    monkeypatch.setattr("trtspec.build.cache_key.time.time", lambda: later)  # the file was not written just now
    for times in (1, 1, 2, 3):
        if times == 2:
            before = file.stat()
            file.write_text("two")  # same length, and the times that it had
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        if times == 3:
            index.write_text("{")
        digests = Digests(index)
        assert digests.of(file) == hashlib.sha256(file.read_bytes()).hexdigest()
        digests.save()
        assert len(read) == times
    file.unlink()
    other = Digests(index)
    other.of(aged(tmp_path / "b", "three"))
    other.save()
    assert json.loads(index.read_text()).keys() == {str(tmp_path / "b")}  # files that are gone are forgotten
    assert names([*tmp_path.glob("index*")]) == ["index.json"]


def test_what_was_written_just_now_is_read_again(tmp_path: Path) -> None:
    """A file written just now is read again: it may change once more within a tick of the file system's clock."""
    file, index = aged(tmp_path / "a", "one"), tmp_path / "index.json"
    digests = Digests(index)
    digests.of(file)
    digests.save()
    assert not index.exists()


def test_the_compiler_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, asked = tmp_path / "c++", tmp_path / "asked"
    program.write_text(f"#!/bin/sh\necho x >> {asked}\necho 'c++ 99.1'\necho more\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    later = time.time() + 60
    monkeypatch.setattr("trtspec.build.cache_key.time.time", lambda: later)
    for _ in range(2):
        digests = Digests(tmp_path / "index.json")
        assert compiler(digests) == (str(program), "c++ 99.1")
        digests.save()
    assert asked.read_text() == "x\n"
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert compiler(digests) is None


# -- locks ------------------------------------------------------------------------------------------------------------


def test_a_lock_is_shared_or_alone(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    first, second = FileLock.acquire(file, shared=True), FileLock.acquire(file, shared=True)
    assert first is not None
    assert second is not None
    assert FileLock.acquire(file) is None
    first.release()
    first.release()  # a second release of the same lock does nothing
    assert FileLock.acquire(file) is None
    second.release()
    alone = FileLock.acquire(file)
    assert alone is not None
    assert FileLock.acquire(file, shared=True) is None
    assert alone.is_on(file)
    file.unlink()
    assert not alone.is_on(file)
    assert file.with_name("other").symlink_to(file) is None
    with pytest.raises(OSError, match="other"):
        FileLock.acquire(file.with_name("other"))
