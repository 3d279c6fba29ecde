"""The choice of peers' settings in benchmarks/real.py, and the meaning of its figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from benchmarks.peers.worker import Queue
from benchmarks.real.contest import Entry, Sweep, Turn, by_batch, fastest, figures, ranges
from benchmarks.real.main import main
from benchmarks.real.prompts import prompts_of, turns_of
from trtspec.text import Tokenizer


def entry(peer: str, method: str, values: str = "") -> Entry:
    return Entry(peer, method, values, "in_" + peer, "bf16", {}, Path(__file__))


def turn(tokens: int, seconds: float, texts: list[list[int]] | None = None, steps: int = 10) -> Turn:
    return Turn(seconds, tokens, 1, steps, texts or [])


OURS, PEER = entry("trtspec", "plain"), entry("peer", "plain")
SLOW, FAST = entry("peer", "EAGLE3", "K=1"), entry("peer", "EAGLE3", "K=3")


def test_the_fastest_setting_of_each_method_is_that_of_the_batch() -> None:
    sweep: Sweep = {
        (OURS, 1): turn(10, 1.0),
        (SLOW, 1): turn(10, 1.0),
        (FAST, 1): turn(20, 1.0),
        (PEER, 1): turn(5, 1.0),
        (SLOW, 8): turn(90, 1.0),
        (FAST, 8): turn(60, 1.0),
    }
    assert fastest(sweep, 1) == [OURS, FAST, PEER]
    assert fastest(sweep, 8) == [SLOW]


def test_the_next_request_starts_when_one_has_ended() -> None:
    queue = Queue(5, at_once=2)
    assert list(queue.start()) == [0, 1]
    assert list(queue.start()) == []
    queue.running -= 1
    assert list(queue.start()) == [2]
    queue.running -= 2
    assert list(queue.start()) == [3, 4]
    assert queue.has_work
    queue.running -= 2
    assert not queue.has_work
    assert list(Queue(3).start()) == [0, 1, 2]


def test_figures_are_medians_of_rounds_next_to_our_best() -> None:
    eagle3 = entry("trtspec", "EAGLE3", "K=3")
    turns = {
        OURS: [turn(10, 1.0, [[1, 2]]), turn(10, 1.0, [[1, 2]]), turn(10, 5.0, [[1, 2]])],
        eagle3: [turn(20, 1.0, [[1, 2]], 5), turn(20, 1.0, [[1, 2]]), turn(20, 5.0, [[1, 2]])],
        FAST: [turn(10, 1.0, [[1, 3]]), turn(10, 2.0, [[1, 3]]), turn(10, 5.0, [[1, 3]])],
    }
    plain, ours, peer = figures(turns)
    assert (plain["tokens_per_second"], plain["ours_over_it"]) == (10, 2)
    assert ours["ours_over_it"] == 1
    assert ours["tokens_per_step"] == pytest.approx(19 / 5)
    assert (peer["tokens_per_second"], peer["ours_over_it"]) == (5, 2)
    assert (peer["texts_equal_ours"], peer["lossless"]) == (0, True)
    assert peer["target_bytes"] == Path(__file__).stat().st_size


def test_who_draws_wrongly_is_asked_for_greedy_texts_alone() -> None:
    assert FAST.takes(8, 0.8)
    assert not FAST.takes(9, 0.0)
    wrong = replace(FAST, draws=False)
    assert wrong.takes(8, 0.0)
    assert not wrong.takes(8, 0.8)


def test_our_own_text_that_differs_is_not_lossless() -> None:
    eagle3 = entry("trtspec", "EAGLE3", "K=3")
    _, ours = figures({OURS: [turn(10, 1.0, [[1, 2]])], eagle3: [turn(20, 1.0, [[1, 3]])]})
    assert not ours["lossless"]


def test_a_schedule_in_words_and_as_vllm_has_it() -> None:
    assert by_batch({2: 3, 5: 2, 8: 1}) == "K=3 up to 2, 2 up to 5, 1 up to 8"
    assert ranges({2: 3, 5: 2, 8: 1}) == [(1, 2, 3), (3, 5, 2), (6, 8, 1)]


class Letters:
    """Takes a text's bytes for its ids."""

    def encode_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        return list(messages[0]["content"].encode())


def test_turns_have_prompts_of_their_own_where_engines_keep_them() -> None:
    tokenizer = cast(Tokenizer, Letters())
    turns, warm_up = turns_of("chat", tokenizer, 12, 4, 8, apart=True)
    every = [tuple(prompt) for prompts in (*turns, warm_up) for prompt in prompts]
    assert [len(prompts) for prompts in turns] == [12] * 4
    assert len(warm_up) == 8
    assert len(set(every)) == len(every)
    with pytest.raises(ValueError, match="4 turns have prompts of their own, and chat has 14 for each; lower"):
        turns_of("chat", tokenizer, 15, 4, 8, apart=True)
    with pytest.raises(ValueError, match="lower --prompts"):
        turns_of("chat", tokenizer, None, 4, 8, apart=True)
    turns, warm_up = turns_of("chat", tokenizer, 12, 4, 8, apart=False)
    assert turns == [prompts_of("chat", tokenizer, 12)] * 4
    assert warm_up == turns[0][:8]


def test_prefix_caching_wants_one_batch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("", ["peers", "--prefix-caching", "--batches", "1", "8", "--temperatures", "0"])
    assert "--prefix-caching wants one of --batches and one of --temperatures" in capsys.readouterr().err
