"""The backends of engine folders: one row each, and how to get at their code, whose dependencies may be missing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from trtspec.backends.compiled import CompiledExecutable
from trtspec.errors import DependencyError


@dataclass(frozen=True)
class Backend:
    """One row."""

    name: str
    executable: str  # "module:class", a CompiledExecutable
    compiler: str  # module with `require()`, which complains where it cannot compile here, and `compile_step`
    functional: bool  # graphs give new KV tensors rather than changing those they are given
    packs: bool  # weights are compiled in the layouts of ops.packing, whether quantised or not
    extra: str | None  # what `pip install 'trtspec[...]'` brings its dependencies

    def load_executable(self) -> type[CompiledExecutable]:
        """DependencyError where a package is missing."""
        module, _, name = self.executable.partition(":")
        return cast("type[CompiledExecutable]", getattr(self._import(module), name))

    def load_compiler(self) -> Callable[..., Any]:
        """Its compile_step, once `require` has agreed. DependencyError where something is missing."""
        module = self._import(self.compiler)
        module.require()
        return cast("Callable[..., Any]", module.compile_step)

    def _import(self, module: str) -> ModuleType:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            if self.extra is None:
                raise
            raise DependencyError(
                f"backend {self.name} needs the package {error.name}: pip install 'trtspec[{self.extra}]'"
            ) from error


_AOTI, _ONNX = "trtspec.backends.aoti", "trtspec.backends.onnx"
BACKENDS = {
    row.name: row
    for row in (
        Backend("aoti", f"{_AOTI}:AotiExecutable", f"{_AOTI}_compile", functional=False, packs=True, extra=None),
        Backend("onnx", f"{_ONNX}:OnnxExecutable", f"{_ONNX}_compile", functional=True, packs=False, extra="onnx"),
    )
}
