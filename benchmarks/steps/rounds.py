"""Turns: whole steps of several engines, timed in one thread, with a bandwidth probe between any two turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trtspec import SamplingParams
from trtspec.engine.core import EngineCore


@dataclass(frozen=True)
class Contestant:
    """A contestant: `steps` generation steps of `engine` with all of `prompts` in the batch are timed."""

    name: str
    engine: EngineCore
    prompts: list[list[int]]
    steps: int
    draft_len: int | None = None  # drafts that every request must have in every step; None: any number
    text: bool = False  # detokenize
    prepare: Callable[[], object] = lambda: None  # called before each turn


@dataclass
class Turn:
    """A contestant in a round: its steps without context rows. Values are in seconds, bytes, bytes per second."""

    contestant: str
    round: int
    tokens: int = 0
    step_times: list[float] = field(default_factory=list)
    host_times: list[float] = field(default_factory=list)  # outside Executable.run
    weight_bytes: float = 0.0  # mean number that a step reads
    read_bandwidth: float = 0.0  # mean of the probes before and after the turn

    @property
    def step(self) -> float:
        """Median wall time of a step."""
        return statistics.median(self.step_times)

    @property
    def host(self) -> float:
        """Median time of a step outside Executable.run."""
        return statistics.median(self.host_times)

    @property
    def mean_host(self) -> float:
        """Mean time of a step outside Executable.run.

        In a batch that goes on, a request gets its tokens only once in many steps, which the median does not show. The
        mean also includes moments in which the machine stands still.
        """
        return statistics.fmean(self.host_times)

    @property
    def tokens_per_second(self) -> float:
        """Mean tokens of a step over its median time, so a moment in which the machine stands still does not count."""
        return self.tokens / len(self.step_times) / self.step

    @property
    def bandwidth_share(self) -> float:
        """Time to read the weights at the probes' bandwidth, as a share of the step's time."""
        return self.weight_bytes / self.read_bandwidth / self.step


def take_turn(contestant: Contestant, round_number: int) -> Turn:
    """Run the contestant's requests until all of its steps are timed, then end them."""
    engine, turn = contestant.engine, Turn(contestant.name, round_number)
    contestant.prepare()
    # Requests may run to the end of the sequence, as a request near its own end asks for fewer drafts.
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=contestant.text)
    samples = [engine.add_request(prompt, params)[0] for prompt in contestant.prompts]
    for sample in samples:
        sample.speculates = contestant.draft_len != 0  # no drafts: the drafter is not called
    read = 0
    while len(turn.step_times) < contestant.steps:
        if not engine.has_work:
            raise RuntimeError(f"{contestant.name}: {samples[0].error or 'the sequences are too short for the steps'}")
        launch_time = sum(executable.seconds for executable in engine.executables)
        before = sum(executable.launches * executable.weight_bytes for executable in engine.executables)
        start = time.perf_counter()
        emissions = engine.step()
        elapsed = time.perf_counter() - start
        if len(emissions) < len(samples) or any(emission.is_context for emission in emissions):
            continue
        for emission in emissions:
            if contestant.draft_len not in (None, emission.draft_len):
                raise RuntimeError(f"{contestant.name}: a step verified {emission.draft_len} drafts")
        launch_time = sum(executable.seconds for executable in engine.executables) - launch_time
        read += sum(executable.launches * executable.weight_bytes for executable in engine.executables) - before
        turn.step_times.append(elapsed)
        turn.host_times.append(elapsed - launch_time)
        turn.tokens += sum(len(emission.tokens) for emission in emissions)
    turn.weight_bytes = read / contestant.steps
    for sample in samples:
        engine.abort(sample.request_id)
    return turn


def take_turns(
    contestants: Sequence[Contestant], rounds: int, probe: Callable[[], float], report: Callable[[str], None]
) -> list[Turn]:
    """Run every contestant once a round, in an order that rotates; the first round, which warms up, is left out.

    Returns the turns by round, and within a round in the order of `contestants`.
    """
    turns = []
    names = [contestant.name for contestant in contestants]
    before = probe()
    for number in range(rounds + 1):
        report(f"round {number} of {rounds}" if number else "warming up")
        shift = number % len(contestants)
        for contestant in [*contestants[shift:], *contestants[:shift]]:
            turn = take_turn(contestant, number)
            after = probe()
            turn.read_bandwidth = (before + after) / 2
            before = after
            if number:
                turns.append(turn)
    return sorted(turns, key=lambda turn: (turn.round, names.index(turn.contestant)))
