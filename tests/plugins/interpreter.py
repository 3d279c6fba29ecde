"""Triton's interpreter, made faster for tests with many rows."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest
from triton.runtime import interpreter


def patch_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter puts its own functions in the place of the language's at each call of a jitted function, which
    takes nine tenths of its time. Once for each module in a launch is enough: they stay until the launch is over."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()

    def patch_once(function: FunctionType) -> Any:
        if id(function.__globals__) in done:
            return None
        done.add(id(function.__globals__))
        return patch(function)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        done.clear()
        launch(self, *arguments, **options)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
