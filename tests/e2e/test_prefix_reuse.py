"""Prefix reuse saves rows and changes no output, in any mode, down to a cache so small that little stays in it.

The reference runs each request alone with reuse turned off.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import (
    VOCAB,
    Case,
    LyingOracle,
    Outcome,
    assert_all_blocks_free,
    draw_params,
    make_target,
    perturbed,
    run_alone,
    run_together,
)
from trtspec import LLM, SamplingParams
from trtspec.build.wiring import prefix_reuse
from trtspec.core import StepInputs, StepOutputs
from trtspec.kv.blocks import BlockAllocator
from trtspec.modes import SpeculativeDecodingMode
from trtspec.protocols import Executable

K = 3
SIZE = 4  # tokens per block
MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": K},
    "draft": {"method": "draft_model", "num_speculative_tokens": K},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)


def make_llm(mode: str, target: Path, draft: Path, **options: Any) -> LLM:
    speculation = MODES[mode]
    if mode == "draft":
        speculation = {**(speculation or {}), "model": str(draft)}
    return LLM(target, speculation, **{"num_kv_blocks": 512, "block_size": SIZE, **options})


def reference(target: Path, cases: Sequence[Case], **options: Any) -> list[Outcome]:
    with LLM(target, num_kv_blocks=512, enable_prefix_caching=False, **options) as llm:
        return run_alone(llm.engine, cases)


class CountRows:
    """The target, counting the rows it computes."""

    def __init__(self, inner: Executable) -> None:
        self.inner = inner
        self.rows = 0

    def run(self, inputs: StepInputs) -> StepOutputs:
        self.rows += len(inputs.input_ids)
        return self.inner.run(inputs)


def count_rows(llm: LLM) -> CountRows:
    loop = llm.engine.loop
    counter = CountRows(loop.target)
    llm.engine.loop = dataclasses.replace(loop, target=counter)
    return counter


# -- the same ids --------------------------------------------------------------------------------------------------

NUM_SHARED = 9  # blocks of the base prompt


def cases_that_share_a_prefix() -> list[Case]:
    """A base prompt, then greedy and sampled prompts that begin with each number of its blocks."""
    rng = random.Random(3)
    base = [rng.randrange(1, VOCAB) for _ in range(NUM_SHARED * SIZE + 1)]
    cases = [Case(base, GREEDY)]
    for shared in range(NUM_SHARED + 1):
        same = base[: shared * SIZE]
        other = 1 + base[len(same)] % (VOCAB - 1)  # not the base's next token
        prompt = [*same, other, *(rng.randrange(1, VOCAB) for _ in range(rng.randrange(2 * SIZE)))]
        cases += [Case(prompt, GREEDY), Case(prompt, SAMPLED)]
    return cases


SHARING = cases_that_share_a_prefix()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def sharing_alone(request: pytest.FixtureRequest, target: Path) -> tuple[str, list[Outcome]]:
    """A dtype, and the outcomes of SHARING in it."""
    return request.param, reference(target, SHARING, dtype=request.param)


@pytest.mark.parametrize("mode", MODES)
def test_ids_are_the_same_for_any_number_of_shared_blocks(
    mode: str, sharing_alone: tuple[str, list[Outcome]], target: Path, draft: Path
) -> None:
    dtype, expected = sharing_alone
    found, outcomes = [], []
    with make_llm(mode, target, draft, dtype=dtype) as llm:
        for case in SHARING:
            before = llm.get_metrics().prefix_hit_tokens
            outcomes += run_alone(llm.engine, [case])
            found.append(llm.get_metrics().prefix_hit_tokens - before)
        assert_all_blocks_free(llm)
    assert outcomes == expected
    assert found[1::2] == [shared * SIZE for shared in range(NUM_SHARED + 1)]
    assert found[2::2] == [(len(case.prompt) - 1) // SIZE * SIZE for case in SHARING[2::2]]  # all but the last row


def crowd(count: int) -> list[Case]:
    """Requests that begin like one of three texts, in which the same few blocks occur in many orders."""
    rng = random.Random(11)
    blocks = [[rng.randrange(1, VOCAB) for _ in range(SIZE)] for _ in range(4)]
    texts = [[token for _ in range(15) for token in rng.choice(blocks)] for _ in range(3)]
    prompts = [
        rng.choice(texts)[: rng.randint(1, 60)] + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(6))]
        for _ in range(count)
    ]
    return [Case(prompt, draw_params(rng)) for prompt in prompts]


CROWD = crowd(40)


@pytest.fixture(scope="module")
def crowd_alone(target: Path) -> list[Outcome]:
    return reference(target, CROWD)


@pytest.mark.parametrize("mode", [*MODES, "user"])
def test_ids_are_the_same_when_blocks_are_evicted_and_requests_preempted(
    mode: str, crowd_alone: list[Outcome], target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evicted: list[int] = []
    evict = BlockAllocator._evict
    monkeypatch.setattr(BlockAllocator, "_evict", lambda self: evicted.append(evict(self)) or evicted[-1])
    tight = {"max_batch_size": 8, "max_num_tokens": 32, "num_kv_blocks": 27, "block_size": SIZE}
    if mode == "user":
        oracle = LyingOracle([c.prompt + o.token_ids for c, o in zip(CROWD, crowd_alone, strict=True)], shorten=0.2)
        llm = LLM(target, {"method": "custom_class", "drafter": oracle, "num_speculative_tokens": K}, **tight)
    else:
        llm = make_llm(mode, target, draft, **tight)
    assert run_together(llm.engine, CROWD).outcomes == crowd_alone
    assert_all_blocks_free(llm)
    stats = llm.get_metrics()
    assert stats.preemptions > 0
    assert len(evicted) > 40
    assert stats.prefix_hit_tokens > 0.2 * stats.prefix_query_tokens


@pytest.mark.parametrize("mode", MODES)
def test_samples_of_a_prompt_that_was_found_are_the_same(mode: str, target: Path, draft: Path) -> None:
    """The same prompt with three samples, twice, has the same outputs.

    The second time, all samples share its blocks, also with the first time.
    """
    case = Case(list(range(1, 15)) * 2, dataclasses.replace(SAMPLED, n=3))
    with make_llm(mode, target, draft) as llm:
        first, second = (run_together(llm.engine, [case]).outcomes for _ in range(2))
        assert llm.get_metrics().prefix_hit_tokens == 27 // SIZE * SIZE
        assert_all_blocks_free(llm)
    with make_llm(mode, target, draft, enable_prefix_caching=False) as llm:
        assert first == second == run_together(llm.engine, [case]).outcomes


# -- fewer rows ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("long"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def long_draft(long_target: Path) -> Path:
    return perturbed(long_target, noise=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_the_second_turn_of_a_long_conversation_is_cheap(mode: str, long_target: Path, long_draft: Path) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(1, VOCAB) for _ in range(2000)]
    with make_llm(mode, long_target, long_draft, block_size=16) as llm:
        rows = count_rows(llm)
        (first,) = run_alone(llm.engine, [Case(prompt, dataclasses.replace(GREEDY, max_tokens=40))])
        assert rows.rows > 2000
        turn = [*prompt, *first.token_ids, *(rng.randrange(1, VOCAB) for _ in range(30))]
        rows.rows = 0
        (second,) = run_alone(llm.engine, [Case(turn, GREEDY)])
        assert rows.rows < 100
        stats = llm.get_metrics()
    assert stats.prompt_tokens == stats.prefix_query_tokens == 2000 + 2070
    assert 2000 <= stats.prefix_hit_tokens <= 2039
    assert stats.prefix_hit_tokens % 16 == 0
    assert [second] == reference(long_target, [Case(turn, GREEDY)])


PROMPT = Case(list(range(1, 15)) * 2, GREEDY)


def test_a_request_may_have_all_its_rows_computed(target: Path) -> None:
    with LLM(target, num_kv_blocks=64, block_size=SIZE) as llm:
        rows = count_rows(llm)
        (first,) = run_alone(llm.engine, [PROMPT])
        cold, rows.rows = rows.rows, 0
        (request,) = llm.engine.add_request(PROMPT.prompt, PROMPT.params)
        request.reuses_prefix = False
        while llm.engine.has_work:
            llm.engine.step()
        assert rows.rows == cold
        assert llm.get_metrics().prefix_hit_tokens == 0
    assert Outcome.of(request) == first


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_a_request_that_still_runs_are_found(mode: str, target: Path, draft: Path) -> None:
    with make_llm(mode, target, draft) as llm:
        llm.engine.add_request(PROMPT.prompt, PROMPT.params)
        llm.engine.step()
        run_alone(llm.engine, [PROMPT])
        assert llm.get_metrics().prefix_hit_tokens == 27 // SIZE * SIZE


@pytest.mark.parametrize("why", ["context", "request", "load"])
def test_rows_without_draft_kv_are_found_and_read_by_the_draft_model_later(
    why: str, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts that follow are those of an engine that computed all rows itself."""
    wanted = reference(target, [PROMPT])
    with make_llm("draft", target, draft) as llm:
        (fresh,) = llm.engine.add_request(PROMPT.prompt, PROMPT.params)
        while llm.engine.has_work:
            llm.engine.step()
    with make_llm("draft", target, draft) as llm:
        proposer, params = llm.engine.loop.proposer, PROMPT.params
        assert proposer.speculation is not None
        with monkeypatch.context() as patch:
            if why == "context":
                patch.setattr(proposer, "speculation", dataclasses.replace(proposer.speculation, max_model_len=10))
            elif why == "load":
                patch.setattr(proposer, "draft_len", lambda scheduler: 0)
            else:
                params = dataclasses.replace(params, max_draft_len=0)
            assert run_alone(llm.engine, [Case(PROMPT.prompt, params)]) == wanted
        (request,) = llm.engine.add_request(PROMPT.prompt, PROMPT.params)
        while llm.engine.has_work:
            llm.engine.step()
        assert llm.get_metrics().prefix_hit_tokens == 27 // SIZE * SIZE
    assert [Outcome.of(request)] == wanted
    assert request.stats == fresh.stats
    assert request.stats.num_accepted_tokens > 0


def test_an_aborted_request_leaves_its_rows_to_others(target: Path) -> None:
    with LLM(target, num_kv_blocks=64, block_size=SIZE) as llm:
        (request,) = llm.engine.add_request(PROMPT.prompt, PROMPT.params)
        llm.engine.step()
        llm.engine.abort(request.request_id)
        run_alone(llm.engine, [PROMPT])
        assert llm.get_metrics().prefix_hit_tokens == 27 // SIZE * SIZE


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"force_num_accepted_tokens": 2}], ids=str)
def test_nothing_is_published(options: dict[str, Any], target: Path) -> None:
    """No blocks are published if the caller turns reuse off, or under forced acceptance.

    A text that was forced is not the model's.
    """
    with LLM(target, MODES["ngram"], num_kv_blocks=64, block_size=SIZE, **options) as llm:
        for _ in range(2):
            run_alone(llm.engine, [PROMPT])
        assert (llm.get_metrics().prefix_query_tokens, llm.get_metrics().prefix_hit_tokens) == (0, 0)


MODE = SpeculativeDecodingMode
FLAGS = {
    MODE.NONE: (False, False),
    MODE.NGRAM: (False, False),
    MODE.SUFFIX: (False, False),
    MODE.USER_PROVIDED: (False, False),
    MODE.DRAFT_TARGET: (True, False),
    MODE.EAGLE3: (True, True),
    MODE.EAGLE3_ONE_MODEL: (True, True),
    MODE.MTP: (True, True),
    MODE.MTP_EAGLE: (True, True),
    MODE.MTP_EAGLE_ONE_MODEL: (True, True),
}


@pytest.mark.parametrize("mode", FLAGS)
def test_the_mode_says_whether_draft_kv_is_kept_and_shifted(mode: SpeculativeDecodingMode) -> None:
    reuse = prefix_reuse(BlockAllocator(2, 1), mode)
    assert (reuse.keeps_draft_kv, reuse.shifted) == FLAGS[mode]
