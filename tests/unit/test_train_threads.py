"""The number of threads of a step: all while they are fast, fewer while others use the cores, and all again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from trtspec.train.threads import REST, Threads

_, LONGEST = REST


@pytest.fixture(autouse=True)
def same_threads_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def used(threads: Threads, steps: int, speed: Callable[[int, int], float]) -> list[int]:
    """Number of threads of each step, if step s on n threads has speed(s, n)."""
    found = []
    for step in range(steps):
        threads.begin()
        found.append(torch.get_num_threads())
        threads.end(speed(step, found[-1]))
    return found


def quiet(step: int, n: int) -> float:
    return 100.0 * n


def busy(step: int, n: int) -> float:
    return 100.0 if n == 1 else 30.0


def test_a_quiet_machine_is_used_whole() -> None:
    with Threads(2) as threads:
        assert used(threads, 40, quiet) == [2, 2, 1] + [2] * 37  # one step measures the other count


def test_a_busy_one_with_a_thread_less_until_it_is_quiet() -> None:
    with Threads(2) as threads:
        used(threads, 5, quiet)
        found = used(threads, 200, lambda step, n: (busy if step < 100 else quiet)(step, n))
    assert found[:3] == [2, 1, 1]
    assert found[3:8] == [1, 1, 1, 2, 1]  # it may have been a moment: all are tried again soon, and then less often
    assert found[:100].count(2) <= 2 + 3 + 100 // LONGEST
    assert found[100 + LONGEST + 2 :] == [2] * (98 - LONGEST)


def test_a_moment_costs_few_steps() -> None:
    with Threads(2) as threads:
        used(threads, 5, quiet)
        found = used(threads, 200, lambda step, n: (busy if step % 100 < 3 else quiet)(step, n))
    assert found.count(1) <= 2 * 6


def test_one_that_is_busy_from_the_start() -> None:
    with Threads(2) as threads:
        found = used(threads, 200, lambda step, n: (busy if step < 150 else quiet)(step, n))
        assert found[3:].count(2) <= 3 + 150 // LONGEST + 50
        assert found[150 + LONGEST + 2 :] == [2] * (48 - LONGEST)


def test_two_of_eight_cores_are_busy() -> None:
    with Threads(8) as threads:
        found = used(threads, 20, lambda step, n: n * 100.0 if n <= 6 else 100.0)
    assert found[:5] == [8, 8, 7, 4, 4]


def test_steps_that_have_more_to_do_from_now_on_are_not_taken_for_a_busy_machine() -> None:
    with Threads(2) as threads:
        found = used(threads, 100, lambda step, n: 100.0 * n / (1 if step < 50 else 5))
    assert found[3:].count(1) <= 2


def test_one_thread_stays_one() -> None:
    with Threads(1) as threads:
        assert used(threads, 50, quiet) == [1] * 50


def test_steps_that_differ_are_not_taken_for_a_busy_machine() -> None:
    """Steps of which every second one also runs the model do not reduce the threads."""
    with Threads(2) as threads:
        found = used(threads, 100, lambda step, n: 100.0 * n / (1 + step % 2))
    assert found[3:] == [2] * 97
