"""Memory that a process can take: what the system has available, and what its control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtspec.build.free_memory import free_memory

GIB = 1 << 30


def write(folder: Path, **entries: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in entries.items():
        (folder / name.replace("_dot_", ".")).write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A system of 64 GiB, of which files fill most."""
    meminfo = f"MemTotal: {64 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {60 << 20} kB\n"
    write(tmp_path / "proc", meminfo=meminfo)
    return tmp_path / "proc"


def free(proc: Path) -> float:
    return free_memory(proc, proc.parent / "cgroup") / GIB


def test_pages_that_cache_files_are_free(proc: Path) -> None:
    assert free(proc) == 60


@pytest.mark.parametrize("path", ["/", "/system/inner"])
def test_a_container_has_what_its_limit_leaves(proc: Path, path: str) -> None:
    """The limit may be that of the group itself, or of one around it."""
    write(proc / "self", cgroup=f"0::{path}\n")
    groups = proc.parent / "cgroup"
    stat = f"anon {GIB}\ninactive_file {GIB}\n"
    write(groups / path.lstrip("/"), memory_dot_max="max\n", memory_dot_current="5\n", memory_dot_stat=stat)
    assert free(proc) == 60
    write(groups, memory_dot_max=f"{8 * GIB}", memory_dot_current=f"{3 * GIB}", memory_dot_stat=stat)
    assert free(proc) == 6


def test_version_1_has_other_names(proc: Path) -> None:
    write(proc / "self", cgroup="9:cpu,cpuacct:/a\n4:memory:/host/knows/this\n")
    write(
        proc.parent / "cgroup" / "memory",  # a container sees its own group as the root
        memory_dot_limit_in_bytes=f"{4 * GIB}",
        memory_dot_usage_in_bytes=f"{3 * GIB}",
        memory_dot_stat=f"inactive_file 5\ntotal_inactive_file {GIB}\n",
    )
    assert free(proc) == 2


def test_this_machine_has_some() -> None:
    assert 1 << 26 < free_memory() < 1 << 50
