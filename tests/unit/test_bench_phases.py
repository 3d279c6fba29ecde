"""What a profile times is there to be timed."""

from __future__ import annotations

import pytest

from trtspec.backends.compiled import CompiledExecutable
from trtspec.backends.cuda.executable import CudaExecutable
from trtspec.bench.phases import phases_inside
from trtspec.bench.profile import PHASES
from trtspec.methods.worker import SpecWorker


@pytest.mark.parametrize("kind", [SpecWorker, CompiledExecutable, CudaExecutable])
def test_methods_are_there_and_phases_are_known(kind: type) -> None:
    """phases_inside names a part's own methods: asked of a class, those of the class."""
    methods = phases_inside.registry[kind](kind)
    assert methods
    for owner, name, phase in methods:
        assert callable(getattr(owner, name))
        assert phase in PHASES


def test_nothing_is_known_of_what_is_in_an_executable_of_another_kind() -> None:
    assert phases_inside(object()) == ()
