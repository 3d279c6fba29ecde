"""Made-up runs of the comparison with peers, in the form of measured ones."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.contests import Contest, Contestant
from benchmarks.peers.results import Run

ROOT = Path(__file__).resolve().parents[2]

PLAIN = Contest("plain, batch 1", 1, 128, 101)
OURS, THEIRS, QUANTISED = Contestant("trtspec"), Contestant("llama", "BF16"), Contestant("llama", "Q8_0", "int8")


def run(contestant: Contestant, repeat: int, seconds: float, output: list[int], contest: Contest = PLAIN) -> Run:
    return Run("40M", contest, contestant, repeat, seconds + 1.0, 1.0, 1, 100, [output], probes=(0.5e9, 1.5e9))
