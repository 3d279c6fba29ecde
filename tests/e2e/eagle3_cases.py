"""EAGLE3 inside a tiny target's graph: cases, their reference, and targets that check launches or fail."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.head_cases import Made, Place, WatchedHead, first_wrong_draft, log_plainly, run_watched, watch
from tests.e2e.tiny import Case, Outcome, Run, assert_all_blocks_free, draw_cases, run_alone
from tests.head_checkpoints import make_eagle3
from trtspec import LLM
from trtspec.core import StepInputs, StepOutputs
from trtspec.protocols import Executable

DTYPES = ("float32", "bfloat16")
K = 3
MOST_K = 7
CAPTURE = (0, 1)
DRAFT_IDS = (0, 9, 4, 12, 1, 2, 14, 5, 6, 11, 8)
CASES = draw_cases(24, seed=27, most_prompt=60)
ROOMY: dict[str, Any] = {"num_kv_blocks": 1000, "block_size": 4}
PLAIN: dict[str, Any] = {**ROOMY, "max_batch_size": 64, "enable_prefix_caching": False}
# Up to 84 tokens a request in 24 blocks of 4, so requests are preempted. At most 32 rows a step, so long prompts are
# prefilled in chunks.
TIGHT: dict[str, Any] = {"max_num_tokens": 32, "num_kv_blocks": 25, "block_size": 4}


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for the target, with 11 of its 16 ids."""
    return make_eagle3(tmp_path_factory.mktemp("eagle3"), target, CAPTURE, DRAFT_IDS)


Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def make(target: Path, folder: Path) -> Make:
    """(K, dtype, fields of the speculation, engine options) -> LLM."""

    def make(k: int = K, dtype: str = "float32", fields: dict[str, Any] | None = None, **options: Any) -> LLM:
        speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": k, **(fields or {})}
        return LLM(target, speculation, dtype=dtype, **options)

    return make


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right outcomes of CASES, and the hidden states and drafts that go with them."""

    outcomes: list[Outcome]
    answers: list[list[int]]
    told: dict[Place, Made]  # drafts of a head that knows the answers and lies
    own: dict[Place, Made]  # drafts of the head itself


def plain(target: Path, cases: Sequence[Case], dtype: str = "float32") -> tuple[list[Outcome], list[list[int]]]:
    """Run each case alone without speculation. Returns their outcomes, and each prompt with its output."""
    with LLM(target, dtype=dtype, enable_prefix_caching=False, **ROOMY) as llm:
        outcomes = run_alone(llm.engine, cases)
    return outcomes, [case.prompt + outcome.token_ids for case, outcome in zip(cases, outcomes, strict=True)]


@pytest.fixture(scope="module")
def reference(target: Path, make: Make) -> Callable[[str], Reference]:
    """dtype -> the reference of CASES, computed when first asked for."""

    def compute(dtype: str) -> Reference:
        outcomes, answers = plain(target, CASES, dtype)
        logs = []
        for words in (answers, None):
            with make(MOST_K, dtype, **PLAIN) as llm:
                logs.append(log_plainly(llm, watch(llm, words), CASES))
        return Reference(outcomes, answers, *logs)

    return functools.cache(compute)


def first_difference(got: Sequence[Outcome], want: Sequence[Outcome]) -> str | None:
    assert len(got) == len(want)
    return next(
        (f"case {i}: {a} instead of {b}" for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None
    )


def assert_lossless(llm: LLM, head: WatchedHead, expected: Reference, count: int = len(CASES)) -> Run:
    """Check the first `count` cases, run together.

    It checks outputs, the hidden states of drafts, draft KV after each step, and that all blocks are free in the end.
    """
    run, seen = run_watched(llm, CASES[:count])
    assert first_difference(run.outcomes, expected.outcomes[:count]) is None
    assert first_wrong_draft(head, seen, expected.own if head.answers is None else expected.told) is None
    assert not seen.incomplete
    assert llm.engine.stats.stale_drafts == 0
    assert_all_blocks_free(llm)
    return run


BASE = [1 + i * i % 14 for i in range(42)]


class HandsOn:
    """The target, with a check that the engine's next inputs are the outputs of the step before.

    Because they are equal, the next step can start before the host has seen the outputs of this one.
    """

    def __init__(self, inner: Executable) -> None:
        self.inner = inner
        self.checked = 0
        self.handed: dict[int, tuple[list[int], int]] = {}  # request id -> next_new_tokens, next_kv_lens

    def run(self, inputs: StepInputs) -> StepOutputs:
        starts, spec = inputs.attn.cu_q_lens.tolist(), inputs.spec
        for b, request in enumerate(spec.request_ids):
            before = int(inputs.attn.kv_lens[b] - spec.seq_lens[b])
            if request in self.handed:
                tokens, kv_len = self.handed[request]
                assert before == kv_len
                if b >= spec.num_contexts:
                    rows = inputs.input_ids[starts[b] : starts[b + 1]].tolist()
                    assert rows == tokens[: len(rows)]
                    self.checked += len(rows)
        outputs = self.inner.run(inputs)
        assert outputs.next_new_tokens is not None
        assert outputs.next_kv_lens is not None
        self.handed = dict(
            zip(
                spec.request_ids,
                zip(outputs.next_new_tokens.tolist(), outputs.next_kv_lens.tolist(), strict=True),
                strict=True,
            )
        )
        return outputs


class LaunchFails:
    """The target, failing whenever a doomed request has reached its length.

    doomed: request id -> that length. after: fail after the launch has written KV, rather than before it runs.
    """

    def __init__(self, inner: Executable, doomed: dict[int, int], after: bool) -> None:
        self.inner = inner
        self.doomed = doomed
        self.after = after
        self.failures = 0

    def run(self, inputs: StepInputs) -> StepOutputs:
        if self.after:
            outputs = self.inner.run(inputs)
        lengths = zip(inputs.spec.request_ids, inputs.attn.kv_lens.tolist(), strict=True)
        if any(length >= self.doomed.get(request, 10**6) for request, length in lengths):
            self.failures += 1
            raise RuntimeError("doomed")
        return outputs if self.after else self.inner.run(inputs)
