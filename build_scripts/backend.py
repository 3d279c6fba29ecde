"""setuptools' build backend, which also compiles the C++ kernels of the CPU into wheels if there is a compiler.

Without a compiler, or if it fails, the wheel has only the kernels' sources. Then pure torch runs until `python -m
trtspec_plugins.cpu` compiles the kernels where they are installed. An editable install compiles nothing: `make` does.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403
from setuptools.command.bdist_wheel import bdist_wheel, get_platform
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parents[1]
FOLDER = Path("trtspec_plugins", "cpu", "_build")
"""Folder of an installation in which the kernels look for their library."""


def kernels() -> ModuleType:
    """The module plugins/cpu/build.py, which is not installed yet."""
    spec = importlib.util.spec_from_file_location("kernels", ROOT / "plugins" / "cpu" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Packages that pip installs for the build: torch, for its headers, only if there is a compiler."""
    wanted = build_meta.get_requires_for_build_wheel(config_settings)
    if kernels().compiler() is not None:
        wanted += re.findall(r'"(torch[>=][^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return wanted


class BuildWithKernels(build_py):
    """A build of the modules, then of the kernels."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        compiled = kernels()
        folder = Path(self.build_lib).absolute() / FOLDER
        for stale in set(folder.glob("*.so")) - {compiled.library(into=folder)}:  # of an earlier build
            stale.unlink()
        try:
            compiled.build(report=print, into=folder)
        except (compiled.BuildError, OSError) as error:
            print(
                f"trtspec is installed without its C++ kernels and will be slow: {error}; then run "
                "python -m trtspec_plugins.cpu",
                file=sys.stderr,
            )


class Wheel(bdist_wheel):
    """A wheel for any Python 3, as the kernels call torch alone. With kernels it is for one platform."""

    def has_kernels(self) -> bool:
        return any(Path(self.bdist_dir, FOLDER).glob("*.so"))

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", get_platform(self.bdist_dir) if self.has_kernels() else "any")

    def write_wheelfile(self, *arguments: Any, **others: Any) -> None:
        self.root_is_pure = not self.has_kernels()
        super().write_wheelfile(*arguments, **others)
