"""The methods that a profile times exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import MASK, make_target
from tests.head_checkpoints import make_dflash
from trtspec import LLM, SamplingParams
from trtspec.backends.compiled import CompiledExecutable
from trtspec.backends.cuda.executable import CudaExecutable
from trtspec.bench.phases import phases_inside
from trtspec.bench.profile import PHASES, Clock, measured
from trtspec.methods.dflash.head import DFlashHead
from trtspec.methods.worker import SpecWorker


@pytest.mark.parametrize("kind", [SpecWorker, CompiledExecutable, CudaExecutable])
def test_methods_are_there_and_phases_are_known(kind: type) -> None:
    """phases_inside names methods that exist and phases that are known. Given a class, it names those of the class."""
    methods = phases_inside.registry[kind](kind)
    assert methods
    for owner, name, phase in methods:
        assert callable(getattr(owner, name))
        assert phase in PHASES


def test_nothing_is_known_of_what_is_in_an_executable_of_another_kind() -> None:
    assert phases_inside(object()) == ()


class Watched(Clock):
    """A clock that keeps the phases it is in, the innermost last."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[str] = []

    def turn(self, name: str | None) -> None:
        super().turn(name)
        if name is None:
            self.phases.pop()
        else:
            self.phases.append(name)


@pytest.mark.parametrize("part", ["fuse", "read_in", "forward", "logits"])
def test_the_pass_over_a_block_is_drafting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    clock, found, inner = Watched(), [], getattr(DFlashHead, part)

    def noting(*arguments: Any, **options: Any) -> Any:
        found.append(clock.phases[-1])
        return inner(*arguments, **options)

    monkeypatch.setattr(DFlashHead, part, noting)
    target = make_target(tmp_path, num_hidden_layers=3)
    draft = make_dflash(tmp_path, target, (0, 2), MASK)
    with LLM(target, {"model": str(draft), "num_speculative_tokens": 3}) as llm:
        llm.engine.add_request([1, 2, 3], SamplingParams())
        with measured(llm.engine, clock):
            llm.engine.step()
    assert set(found) == {"draft"}
    assert not clock.phases
