"""The demo generates the recorded ids, and keeps as many drafts as recorded.

demo_ids.json was recorded before the code was split by methods. A change of ids is a change of arithmetic, so record
the file again only for an intended one (demo_ids.py record).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from trtspec_plugins.cpu.build import INSTRUCTION_SETS

from examples.demo.__main__ import MODES
from tests.e2e.demo_ids import FILE, ISAS, run_under
from trtspec.ops import load_plugins

RECORDED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def instruction_sets() -> list[str]:
    """The instruction sets of this machine, the best one last. Empty if the kernels are not built."""
    best, order = load_plugins().get("cpu"), [*INSTRUCTION_SETS]
    return [] if best is None else [isa for isa in ISAS if order.index(isa) <= order.index(best)]


def check(backend: str, isa: str, modes: list[str]) -> None:
    assert run_under(isa, backend, modes) == {mode: RECORDED[backend][isa][mode] for mode in modes}


def test_ids_and_drafts_are_those_that_were_recorded() -> None:
    found = instruction_sets()
    if not found:
        pytest.skip("the CPU kernels are not built")
    check("eager", found[-1], ["eagle3"])


@pytest.mark.long
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("backend", ["eager", "aoti"])
def test_on_every_instruction_set(backend: str, isa: str) -> None:
    """Ids and drafts are as recorded on every instruction set that this machine has.

    Ids of compiled graphs also depend on the CPU's own vectors, so they are compared on the kind of CPU that recorded
    them.
    """
    if isa not in instruction_sets():
        pytest.skip(f"this machine has no {isa}")
    check(backend, isa, list(MODES))


def test_every_mode_gives_what_plain_decoding_gives_on_every_instruction_set() -> None:
    """In the recorded file, speculation, instruction set and backend change no id."""
    plain = RECORDED["eager"]["portable"]["plain"]
    for modes in (of_isa for of_backend in RECORDED.values() for of_isa in of_backend.values()):
        assert set(modes) == set(MODES)
        for mode, by_temperature in modes.items():
            if mode != "mtp":  # its target is a checkpoint of its own
                assert all(one["ids"] == plain[t]["ids"] for t, one in by_temperature.items())
