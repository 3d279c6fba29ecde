"""Triton's interpreter, made faster: import `fast_interpreter` into a test module."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture(scope="module", autouse=True)
def fast_interpreter() -> Iterator[None]:
    """Let the interpreter patch each module only once per launch.

    The interpreter replaces the language's functions with its own at each call of a jitted function, which takes most
    of its time. Once per module and launch is enough, because its functions stay until the launch is over.
    """
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

    with pytest.MonkeyPatch.context() as change:
        change.setattr(interpreter, "_patch_lang", patch_once)
        change.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        yield
