"""Backend tensorrt_rtx: plans of TensorRT's own layers, without plugins, for consumer cards.

TensorRT-RTX builds them on any machine, also without a GPU, for the architectures that are asked for. The networks are
those of backend tensorrt with attention = "native", and our other ops are written as layers, too (inline.py, draws.py).
So two models, or a head with one draft, draft in the launch, and drafters on the host verify any number of drafts.

No card has run such a plan. Tests build plans, and compute the networks layer by layer as documented.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trtspec.backends.compiled import CompiledStep
from trtspec.backends.sizes import Sizes
from trtspec.backends.tensorrt import compile as tensorrt
from trtspec.backends.tensorrt.executable import TensorRTExecutable, open_cuda
from trtspec.backends.tensorrt.profiles import TensorRTOptions
from trtspec.errors import CheckpointError, DependencyError
from trtspec.methods.step import Step

MODULES = ("tensorrt_rtx", "tensorrt_rtx_bindings")
"""Names of the module, in the order in which they are tried. The second is what wheels of the bindings alone have."""

_VERSION, _ARCHITECTURES = "tensorrt_rtx", "architectures"


@functools.cache
def load_rtx() -> Any:
    """Import TensorRT-RTX. DependencyError if it is not installed."""
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            said = error
    raise DependencyError(f"TensorRT-RTX is missing ({said}): pip install 'trtspec[tensorrt-rtx]'") from said


def require() -> None:
    """Raise DependencyError if TensorRT-RTX is missing. A GPU is not needed."""
    load_rtx()


def compile_step(
    step: Step,
    block_size: int,
    wanted: Sequence[tuple[int, bool]],
    folder: Path,
    report: Callable[[str], None] = lambda what: None,
    *,
    sizes: Sizes,
    options: TensorRTOptions,
) -> CompiledStep:
    """Build the graphs of these (K, uniform) of a functional `step` into `folder`, which must exist.

    options: those of TensorRTOptions.without_plugins. Raises what compile.compile_step does.
    """
    trt = load_rtx()
    needs = {_VERSION: str(trt.__version__), _ARCHITECTURES: ",".join(map(str, options.sm))}
    return tensorrt.compile_step(
        step, block_size, wanted, folder, report, sizes=sizes, options=options, trt=trt, own_layers=needs
    )


class RtxExecutable(TensorRTExecutable):
    """A TensorRTExecutable that runs plans of TensorRT-RTX."""

    @classmethod
    def library(cls) -> Any:
        """Import TensorRT-RTX. DependencyError if it is not installed."""
        return load_rtx()

    @classmethod
    def check(cls, compiled: CompiledStep) -> None:
        """Raise CheckpointError if the plans are for another TensorRT-RTX or GPU, DependencyError if one is missing."""
        version, architecture = str(load_rtx().__version__), open_cuda().device()["compute_capability"].replace(".", "")
        if compiled.made_for[_VERSION] != version:
            raise CheckpointError(
                f"the engine was built by TensorRT-RTX {compiled.made_for[_VERSION]}, this is {version}; rebuild it "
                "with trtspec build"
            )
        built = compiled.made_for[_ARCHITECTURES].split(",")
        if architecture not in built:
            raise CheckpointError(
                f"the engine was built for the architectures {', '.join(built)}, this GPU has {architecture}; rebuild "
                f"it with trtspec build --sm {architecture}"
            )

    def _prepare(self, runtime: Any) -> None:
        """Do nothing."""
