"""How much memory this process can still take: what the system has available, within the limits of containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_V2 = "memory.max", "memory.current", "inactive_file"
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process could take now.

    Pages that only cache files count as free. proc, cgroups: where Linux shows the system and its control groups.
    """
    return max(min([_available(proc), *_rooms(proc, cgroups)]), 0)


def _available(proc: Path) -> int:
    with suppress(OSError, ValueError):
        return 1024 * _entry(proc / "meminfo", "MemAvailable:")
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each control group that limits this process's memory has left."""
    groups: list[tuple[Path, str, tuple[str, str, str]]] = []
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            number, kinds, path = line.split(":", 2)
            if number == "0":
                groups.append((cgroups, path, _V2))
            elif "memory" in kinds.split(","):
                groups.append((cgroups / "memory", path, _V1))
    for root, path, (limit, usage, cached) in groups:
        place = PurePosixPath(path.lstrip("/"))
        for one in (place, *place.parents):  # in a container the root may stand for the group itself
            folder = root / one
            with suppress(OSError, ValueError):  # "max" is no limit
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                yield most - used + _entry(folder / "memory.stat", cached)


def _entry(file: Path, name: str) -> int:
    """The number after a name at the beginning of a line. ValueError if there is none."""
    for line in file.read_text(encoding="utf-8").splitlines():
        first, *rest = line.split()
        if first == name:
            return int(rest[0])
    raise ValueError(f"{file} has no {name}")
