"""Packages of AOTInductor graphs (.pt2), which torch loads or which are unpacked for the kernels' library."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from trtspec.errors import CheckpointError, EngineError
from trtspec.ops import Lent

Run = Callable[[list[Tensor]], list[Tensor]]
_FAILURES = (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)  # to read or load a package


def load_graph(
    file: Path,
    weights: Mapping[str, Tensor],
    kv: Sequence[Tensor],
    alone: bool = False,
    device: int = -1,
    name_of: Callable[[str], str] = str,
) -> Run:
    """Return a function that runs the graph in `file` on the memory of `weights`, which the caller keeps alive.

    The function takes the tensors that come before the caches `kv`. alone: run without the events that guard the graph
    against other threads, because a CUDA graph cannot contain them. device: index of the GPU; -1 = the current GPU, or
    the CPU. name_of: maps the name of a graph's constant to its name in `weights`. CheckpointError for a damaged file,
    EngineError if the graph cannot be loaded.
    """
    with loading(file):
        # not torch._inductor.aoti_load_package: to import that module, which is for compiling, takes two seconds
        model = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", alone, 1, device)
    lent = Lent()
    constants = {name: lent.lend(weights[name_of(name)]) for name in model.get_constant_fqns()}
    model.load_constants(constants, False, True, True)  # all constants, user-managed: the graph uses our memory

    def run(tensors: list[Tensor]) -> list[Tensor]:
        return model.run([*tensors, *kv])

    lent.until_gone(run)
    return run


def unpack(file: Path, into: Path) -> Path | None:
    """Unpack the library of the graph in `file` into a folder; None if the graph calls ops through torch's loader."""
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        library = _library(names)
        if str(PurePosixPath(library).with_suffix(".json")) in names:
            return None
        unpacked = into / f"{file.stem}.so"
        unpacked.write_bytes(archive.read(library))
        return unpacked


def _library(names: Sequence[str]) -> str:
    """Name of the library in a .pt2 file. BadZipFile if there is none."""
    for name in names:
        if name.endswith(".so"):
            return name
    raise zipfile.BadZipFile("it has no library")


@contextmanager
def loading(*files: Path) -> Iterator[None]:
    """Turn failures to load graphs into CheckpointError or EngineError.

    CheckpointError if one of `files` is damaged. EngineError if none is: the cause is then the folder for temporary
    files, from which graphs are loaded.
    """
    try:
        yield
    except _FAILURES as error:
        for file in sorted(set(files)):
            if why := _damage(file):
                raise CheckpointError(f"{file} is damaged ({why}); copy it again or rebuild the engine") from error
        raise EngineError(
            f"the graphs of {files[0].parent} cannot be loaded ({error}); "
            "set TMPDIR to a folder that has room and is not mounted noexec"
        ) from error


def _damage(file: Path) -> str:
    """Description of what is wrong with a package; "" if it is intact."""
    try:
        with zipfile.ZipFile(file) as archive:
            _library(archive.namelist())
            broken = archive.testzip()
    except _FAILURES as error:
        return str(error) or type(error).__name__
    return f"{broken} in it" if broken else ""
