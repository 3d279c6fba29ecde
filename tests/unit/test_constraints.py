"""The constraints of each logits row of a step, from the tokens before the row."""

from __future__ import annotations

from typing import Any

from trtspec.engine.constraints import logit_constraints
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Scheduled
from trtspec.sampling_params import RequestSampling

GREEDY: dict[str, Any] = {"greedy": True, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


def request(tokens: list[int], prompt_len: int, drafts: list[int] | None = None, **asked: Any) -> Request:
    made = Request(
        request_id=0,
        tokens=tokens,
        prompt_len=prompt_len,
        sampling=RequestSampling(**GREEDY, **asked),
        length_limit=10000,
        min_tokens=0,
        eos_ids=frozenset(),
        stop_token_ids=frozenset(),
        include_stop=False,
        text=None,
    )
    made.drafts = drafts or []
    made.kv.committed = 0 if len(tokens) == prompt_len else len(tokens) - 1
    return made


def test_nobody_asks() -> None:
    assert logit_constraints((Scheduled(request([1, 2], 2), 2, 0, True),)) is None


def test_a_generation_sees_its_drafts_and_a_chunk_of_a_prompt_what_it_has_read() -> None:
    """A generation has a row more than drafts, and a chunk of a prompt has one, which sees the tokens it has read."""
    chunk = request([7, 8, 9, 9], 4, repetition_penalty=1.5)
    full = request([1, 2, 3], 2, [4, 5], presence_penalty=0.5)
    short = request([1, 6], 1, [3], frequency_penalty=-1.0)
    other = request([5, 5], 1)
    batch = (
        Scheduled(chunk, 3, 0, True),
        Scheduled(full, 3, 2, False),
        Scheduled(short, 2, 1, False),
        Scheduled(other, 1, 0, False),
    )
    constraints = logit_constraints(batch)
    assert constraints is not None
    want = [[7, 8, 9], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 6], [1, 6, 3], []]
    assert [[token for token in row if token >= 0] for row in constraints.history.tolist()] == want
    assert constraints.prompt_lens.tolist() == [4, 2, 2, 2, 1, 1, 1]
    asked = [(1.5, 0.0, 0.0), *[(1.0, 0.5, 0.0)] * 3, *[(1.0, 0.0, -1.0)] * 2, (1.0, 0.0, 0.0)]
    assert constraints.penalties.tolist() == [list(one) for one in asked]
    assert constraints.bias_ids.numel() == constraints.allow_mask.numel() == 0


class Counted(list[int]):
    """A list of tokens that counts the tokens read from it."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found

    def __add__(self, more: Any) -> Any:
        self.read += len(self)
        return super().__add__(more)


def test_a_history_is_read_once() -> None:
    """A history is not read in every step: thousands of tokens of many requests would take longer than a launch."""
    one = request(Counted(range(500)), 400, [7, 8], repetition_penalty=1.5)
    for tokens in ([], [3], [4, 5]):
        one.append(tokens)
        known = list(one.tokens)
        constraints = logit_constraints((Scheduled(one, 3, 2, False),))
        assert constraints is not None
        assert [row[: len(known) + j] for j, row in enumerate(constraints.history.tolist())] == [
            known + [7, 8][:j] for j in range(3)
        ]
    assert one.tokens.read == 503


def test_biases_are_padded() -> None:
    one, two = request([1], 1, logit_bias=((3, 2.0),)), request([1, 2], 1, logit_bias=((0, -1.0), (5, 0.5)))
    constraints = logit_constraints((Scheduled(one, 1, 0, True), Scheduled(two, 1, 0, False)))
    assert constraints is not None
    assert constraints.bias_ids.tolist() == [[3, -1], [0, 5]]
    assert constraints.bias_values.tolist() == [[2.0, 0.0], [-1.0, 0.5]]
    assert constraints.history.numel() == constraints.penalties.numel() == 0
