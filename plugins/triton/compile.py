"""Compile kernels ahead of time, for GPUs that need not be present, and report what they use of a GPU.

`build_scripts/build_plugins.py --target triton` does this for the launches of kernels.py and prints the figures. The
same function compiles the TensorRT plugins (plugins/tensorrt/build.py). At run time, Triton itself compiles torch's
kernels when they are first launched.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from trtspec_plugins.triton import import_triton

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
MOST_SHARED_BYTES = 99 * 1024  # limit of a block on sm_86, sm_89 and sm_120; sm_80, sm_90 and sm_100 have more
_COLUMNS = ("threads", "registers", "shared", "stack", "spill-stores", "spill-loads")


class BuildError(Exception):
    """An error for kernels that could not be compiled. The message says what to do."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and how to compile it. `signature` has the types of its arguments, in Triton's spelling."""

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    options: dict[str, Any] = field(default_factory=lambda: {"enable_fp_fusion": False})  # __init__.py: roundings
    aligned: tuple[str, ...] = ()  # arguments that are multiples of 16: addresses in bytes, or integers


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and what it uses. Registers are per thread; stack and spills are bytes per thread."""

    ptx: str
    cubin: bytes
    entry: str  # name of the kernel in the PTX
    target: str  # as in the PTX: sm_90a runs on 9.0 alone, sm_80 on 8.0 and all later ones
    num_threads: int  # of a block
    shared_bytes: int  # of a block
    scratch_bytes: int  # of the GPU's memory, which the launcher must provide
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def fits(self) -> bool:
        """Whether all variables are in registers, and every GPU has enough shared memory."""
        in_registers = self.stack_bytes == self.spill_store_bytes == self.spill_load_bytes == 0
        return in_registers and self.shared_bytes <= MOST_SHARED_BYTES

    def figures(self) -> tuple[int, ...]:
        """Figures in the order of _COLUMNS."""
        taken = (self.num_threads, self.registers, self.shared_bytes, self.stack_bytes)
        return (*taken, self.spill_store_bytes, self.spill_load_bytes)


def compiler() -> ModuleType:
    """Triton, if it can compile. Raises BuildError otherwise."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise BuildError("TRITON_INTERPRET=1 asks for the interpreter, which compiles nothing: unset it")
    try:
        return import_triton()
    except ImportError as error:
        raise BuildError(str(error)) from error


def number(architecture: str) -> int:
    """Number of an architecture: 90 for "sm_90" and for "sm_90a". BuildError for a name that is not spelt like these.

    As Triton compiles it, code for 9.0 always runs on 9.0 alone.
    """
    found = re.fullmatch(r"sm_(\d{2,3})a?", architecture)
    if found is None:
        raise BuildError(f"{architecture}: an architecture is written like sm_90 or sm_90a")
    return int(found[1])


def compile_kernel(kernel: Kernel, architecture: str, **options: Any) -> Binary:
    """Compile a kernel anew. options: of Triton's compiler; they override the kernel's own. Raises BuildError."""
    triton = compiler()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**kernel.signature, **dict.fromkeys(kernel.constants, "constexpr")}
    place = kernel.function.arg_names.index
    aligned = {(place(name),): [["tt.divisibility", 16]] for name in kernel.aligned}
    source = ASTSource(kernel.function, types, kernel.constants, aligned)
    target = GPUTarget("cuda", number(architecture), 32)
    options = {"num_warps": kernel.num_warps, **kernel.options, **options}
    log = io.StringIO()  # output of the assembler that Triton runs, with Triton's options
    try:
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = True
            triton.knobs.compilation.always_compile = True  # a cached kernel would leave no log
            made = triton.compile(source, target=target, options=options)
    except Exception as error:
        name = kernel.function.__name__
        raise BuildError(f"Triton {triton.__version__} did not compile {name} for {architecture}: {error}") from error
    metadata, ptx = made.metadata, made.asm["ptx"]
    return Binary(
        ptx,
        made.asm["cubin"],
        entry=metadata.name,
        target=_one(r"^\.target (\w+)", ptx),
        num_threads=metadata.num_warps * 32,
        shared_bytes=metadata.shared,
        scratch_bytes=metadata.global_scratch_size + metadata.profile_scratch_size,
        registers=int(_one(r"Used (\d+) registers", log.getvalue())),
        stack_bytes=_most(r"(\d+) bytes stack frame", log.getvalue()),
        spill_store_bytes=_most(r"(\d+) bytes spill stores", log.getvalue()),
        spill_load_bytes=_most(r"(\d+) bytes spill loads", log.getvalue()),
    )


def _one(pattern: str, text: str) -> str:
    found = re.findall(pattern, text, re.MULTILINE)
    if len(found) != 1:
        raise BuildError(f"one {pattern!r} was expected, {len(found)} are in: {text[:1000]}")
    return str(found[0])


def _most(pattern: str, text: str) -> int:
    """The largest match, over a kernel and the functions that it calls."""
    found = re.findall(pattern, text)
    if not found:
        raise BuildError(f"no {pattern!r} is in what the assembler said: {text[:1000]}")
    return max(map(int, found))


def report(architectures: Sequence[str], names: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Compile the launches of those names, or all, and print what each kernel uses. Returns those that do not fit."""
    compiler()
    from trtspec_plugins.triton.kernels import LAUNCHES, kernels

    for architecture in architectures:
        number(architecture)
    unknown = [name for name in names if name not in LAUNCHES]
    if unknown:
        raise BuildError(f"no such kernel: {', '.join(unknown)}; there are {', '.join(LAUNCHES)}")
    width = max(map(len, LAUNCHES))
    say(f"{'launch':<{width}}  {'kernel':<28} {'target':<8}" + "".join(f" {title:>12}" for title in _COLUMNS))
    misfits = []
    for name in names or LAUNCHES:
        for kernel in kernels(name):
            for architecture in architectures:
                binary = compile_kernel(kernel, architecture)
                figures = "".join(f" {figure:>12}" for figure in binary.figures())
                say(f"{name:<{width}}  {binary.entry:<28} {binary.target:<8}{figures}")
                if not binary.fits:
                    misfits.append(f"{name} ({binary.entry}, {binary.target})")
    return misfits


def main(architectures: Sequence[str] = (), names: Sequence[str] = ()) -> int:
    """`build_scripts/build_plugins.py --target triton`: returns 1 if a kernel does not compile, or does not fit."""
    try:
        misfits = report(architectures or ARCHITECTURES, names, print)
    except (BuildError, OSError) as error:
        print(f"the Triton kernels were not compiled: {error}", file=sys.stderr)
        return 1
    if misfits:
        wrong = f"variables in memory, or more than {MOST_SHARED_BYTES} bytes of shared memory"
        print(f"these have {wrong}: {', '.join(misfits)}", file=sys.stderr)
    return 1 if misfits else 0
