"""Compile the AOT plugins' kernels to PTX (`build_scripts/build_plugins.py --target tensorrt`). Needs Triton, no GPU.

_build/manifest.json says for each PTX file what it was made from and how to launch it. Files that are up to date are
kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from trtspec_plugins.triton.compile import ARCHITECTURES, BuildError, Kernel, compile_kernel, compiler, number

PTX_VERSION = 87  # CUDA 12.8: old enough for every driver that TensorRT 11 runs with, new enough for sm_120
COMMON_ATTENTION = tuple(f"SpecAttention-bf16-d{head_dim}-g{group}" for head_dim in (64, 128) for group in (1, 2, 4, 8))
COMMON_LINEARS = ("LinearLogits-bf16", "LinearLogits-fp16")
COMMON_LINEARS += tuple(f"QuantizeGroups-bf16-g{group}" for group in (32, 128))
COMMON_LINEARS += tuple(f"GroupsLinear-bf16-w4-g{group}" for group in (32, 128))
COMMON_COMPACTION = tuple(f"KvCompact-bf16-l{length}" for length in (8, 16, 32, 64))
_SOURCES = Path(__file__).parent
MOST_SHARED = 48 * 1024  # bytes of shared memory: a launch with more must ask for it, which TensorRT is not known to do
_HIDDEN = 2  # pointers that Triton appends to a kernel's parameters: global scratch, profile scratch


@dataclass(frozen=True)
class Compiled:
    """A line of the manifest: where a kernel's PTX is, how it is launched and what it was made from."""

    file: str
    entry: str  # name of the kernel in the PTX
    parameters: int
    num_threads: int  # of a block
    shared_bytes: int  # of a block
    target: str  # as in the PTX: sm_90a runs on 9.0 alone, sm_80 on 8.0 and all later ones
    digest: str


def folder() -> Path:
    """Folder of the PTX files: $TRTSPEC_TENSORRT_PLUGIN_DIR, or `_build` next to the sources."""
    return Path(os.environ.get("TRTSPEC_TENSORRT_PLUGIN_DIR") or _SOURCES / "_build")


def manifest() -> dict[str, Compiled]:
    """Compiled kernels by "<plugin>-<architecture>"; without those that another version of this file wrote."""
    try:
        lines = json.loads((folder() / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    names = {field.name for field in fields(Compiled)}
    return {key: Compiled(**line) for key, line in lines.items() if set(line) == names}


def sources_digest() -> str:
    """Digest of all that determines a kernel's PTX, except the compiler."""
    digest = hashlib.sha256(str(PTX_VERSION).encode())
    for source in [_SOURCES / "build.py", _SOURCES / "kernels.py", *sorted((_SOURCES.parent / "triton").glob("*.py"))]:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def compiled_for(name: str, architecture: str) -> Compiled:
    """The compiled kernel for "sm_90" ("sm_90a"), or else for an older architecture whose PTX runs on newer GPUs too.

    LookupError if there is none or it is out of date; it has the command that helps.
    """
    command = f"run build_scripts/build_plugins.py --target tensorrt --arch {architecture} --kernels {name}"
    wanted = number(architecture)
    ours = {key: line for key, line in manifest().items() if key.startswith(f"{name}-sm_")}
    exact = ours.get(f"{name}-sm_{wanted}")
    portable = [line for line in ours.values() if line.target[-1].isdigit() and number(line.target) <= wanted]
    found = exact or max(portable, key=lambda line: number(line.target), default=None)
    if found is None:
        raise LookupError(f"the kernel {name} is not compiled for {architecture}: {command}")
    if not found.digest.startswith(sources_digest()):
        raise LookupError(f"{found.file} was compiled from other sources than the present: {command}")
    return found


def build(
    architectures: Sequence[str] = ARCHITECTURES,
    names: Sequence[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Compiled]:
    """Compile kernels for each architecture ("sm_90", "sm_90a") unless that is done. Returns the manifest.

    names: kernels of kernels.py; without any, those that serve every model and the COMMON ones.
    Raises BuildError.
    """
    numbers = [number(architecture) for architecture in architectures]
    triton = compiler()
    from trtspec_plugins.tensorrt.kernels import KERNELS, kernel

    done, digest = manifest(), f"{sources_digest()}-triton-{triton.__version__}"
    folder().mkdir(parents=True, exist_ok=True)
    for architecture in (f"sm_{wanted}" for wanted in numbers):
        for name in names or (*KERNELS, *COMMON_LINEARS, *COMMON_ATTENTION, *COMMON_COMPACTION):
            key = f"{name}-{architecture}"
            if key in done and done[key].digest == digest and (folder() / done[key].file).is_file():
                report(f"{key} is up to date")
                continue
            try:
                wanted = kernel(name)
            except LookupError as error:
                raise BuildError(f"no such kernel: {error}") from error
            ptx, compiled = _compile(wanted, architecture, f"{key}.ptx", digest)
            _write(folder() / compiled.file, ptx)
            done = _enter(key, compiled)
            report(f"compiled {key}: {compiled.target}, {compiled.num_threads} threads a block")
    return done


def _enter(key: str, compiled: Compiled) -> dict[str, Compiled]:
    """Enter a kernel into the manifest, which other processes may change at the same time. Returns the manifest."""
    with (folder() / "manifest.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        done = {**manifest(), key: compiled}
        lines = {key: asdict(line) for key, line in sorted(done.items())}
        _write(folder() / "manifest.json", json.dumps(lines, indent=1) + "\n")
    return done


def _compile(kernel: Kernel, architecture: str, file: str, digest: str) -> tuple[str, Compiled]:
    binary = compile_kernel(kernel, architecture, ptx_version=PTX_VERSION)
    if binary.scratch_bytes:
        raise BuildError(
            f"{file}: the kernel wants {binary.scratch_bytes} bytes of scratch memory, which TensorRT does not give it"
        )
    if binary.shared_bytes > MOST_SHARED:
        raise BuildError(
            f"{file}: the kernel wants {binary.shared_bytes} bytes of shared memory, and TensorRT is not known to give "
            f"it more than {MOST_SHARED}; use bf16 or fp16, or attention = 'native'"
        )
    ptx = without_hidden_parameters(binary.ptx, len(kernel.signature))
    launch = (binary.num_threads, binary.shared_bytes)
    return ptx, Compiled(file, binary.entry, len(kernel.signature), *launch, binary.target, digest)


def without_hidden_parameters(ptx: str, parameters: int) -> str:
    """The PTX with only its first `parameters` parameters.

    Triton appends two pointers, which its own launcher passes and TensorRT does not. A launch that passes fewer
    arguments than the kernel declares reads past them. BuildError if one of the two is used.
    """
    entry = re.search(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise BuildError("the PTX has no entry point")
    declared = [line.strip() for line in entry[2].split(",")]
    kept, hidden = declared[:parameters], declared[parameters:]
    names = [line.split()[-1] for line in hidden]
    body = ptx[entry.end() :]
    if len(hidden) != _HIDDEN or any(re.search(rf"\b{name}\b", body) for name in names):
        raise BuildError(
            f"{entry[1]}: {parameters} parameters and {_HIDDEN} unused ones were expected, but the PTX declares "
            f"{', '.join(declared)}; this version of Triton is not known, install triton==3.9.0"
        )
    return f"{ptx[: entry.start(2)]}\n\t" + ",\n\t".join(kept) + f"\n{ptx[entry.end(2) :]}"


def _write(path: Path, text: str) -> None:
    """Write a file atomically, so that no process reads half of it."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def main(architectures: Sequence[str] = (), names: Sequence[str] = ()) -> int:
    """`build_scripts/build_plugins.py --target tensorrt`: returns 1 if the kernels were not built."""
    try:
        build(architectures or ARCHITECTURES, names, print)
    except (BuildError, OSError) as error:
        print(f"the TensorRT plugins' kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0
