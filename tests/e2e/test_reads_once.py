"""Making an engine from a configuration reads each config.json once, and calls each resolver once."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.modes import RECIPES, Models
from trtspec import LLM
from trtspec.build import context as context_module
from trtspec.build import speculation as speculation_module
from trtspec.methods.table import METHODS
from trtspec.modes import SpeculativeDecodingMode

_opened: Counter[str] | None = None  # opened files by path; None: not counting


def _count_opened(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and str(args[0]).endswith("config.json"):
        _opened[str(args[0])] += 1


sys.addaudithook(_count_opened)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    global _opened
    _opened = Counter()
    try:
        yield _opened
    finally:
        _opened = None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("reads"))


def counted(calls: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return function(*args, **options)

    return call


@pytest.mark.parametrize("mode", RECIPES, ids=lambda mode: mode.name)
def test_every_config_is_read_once_and_every_resolver_called_once(
    models: Models, mode: SpeculativeDecodingMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, calls = RECIPES[mode], Counter[str]()
    target, speculation = models.folder(recipe.target), recipe.speculation(models, 2)
    row = METHODS[recipe.fields["method"]]
    for name in ("read_draft", "plan_speculation", "recognise"):
        monkeypatch.setattr(speculation_module, name, counted(calls, name, getattr(speculation_module, name)))
    for name in ("read_target", "plan_for_target"):
        monkeypatch.setattr(context_module, name, counted(calls, name, getattr(context_module, name)))
    if row.checkpoint is not None:
        module, _, name = row.checkpoint.path.partition(":")
        monkeypatch.setattr(
            importlib.import_module(module), name, counted(calls, "the room's reader", row.checkpoint.open())
        )
    with counting() as opened, LLM(target, speculation, dtype="float32", max_batch_size=2, max_num_tokens=16):
        read = {Path(file): count for file, count in opened.items() if Path(file).name == "config.json"}
    draft = {} if recipe.draft is None else {models.folder(recipe.draft) / "config.json": 1}
    assert read == {target / "config.json": 1, **draft}
    assert calls.pop("recognise", 0) == len(draft)  # each named folder is recognised
    assert calls.pop("the room's reader", 0) == (row.checkpoint is not None)
    assert calls == dict.fromkeys(("read_target", "read_draft", "plan_for_target", "plan_speculation"), 1)
