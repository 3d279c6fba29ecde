"""Which CUDA graphs an engine captures, when, and the memory that they share. A thread stands in for the GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.async_stand_in import HostQueue
from tests.e2e.test_cuda_executable import LIMITS, K, speculation
from tests.e2e.tiny import VOCAB, Case, Outcome, perturbed, run_alone, run_together
from tests.head_checkpoints import make_eagle3
from trtspec import LLM, SamplingParams
from trtspec.backends.cuda import executable as cuda_executable
from trtspec.backends.cuda.static_graph import StaticGraph
from trtspec.errors import CapacityError


@pytest.fixture(scope="module")
def models(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cuda-graphs")
    eagle3 = make_eagle3(folder, target, (0, 1), tuple(range(11)))
    return {"target": target, "eagle3": eagle3, "draft_model": perturbed(target, 0.1, folder)}


def test_a_graph_that_is_captured_late_spoils_no_step_in_flight(models: dict[str, Path], work: HostQueue) -> None:
    """A graph that is captured late leaves the step in flight intact.

    The second request has bans, so a graph is captured while a step of the first is in flight. The next step reads the
    outputs of that step.
    """
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    late = dataclasses.replace(params, ignore_eos=False, min_tokens=30, stop_token_ids=[3])
    prompts = [([1, 2, 3], params), ([3, 4], late)]
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, [Case(*prompt) for prompt in prompts])
    with LLM(models["target"], backend="cuda", **LIMITS) as llm:
        before = work.num_captured
        requests = []
        for prompt in prompts:
            requests += llm.engine.add_request(*prompt)
            for _ in range(4):
                llm.engine.step()
        while llm.engine.has_work:
            llm.engine.step()
        assert work.num_captured > before
        assert [Outcome.of(request) for request in requests] == outcomes


@pytest.mark.parametrize("mode", ["none", "eagle3"])
def test_graphs_share_the_memory_of_logits(models: dict[str, Path], work: HostQueue, mode: str) -> None:
    cases = [
        Case([i + 1, 2, 3], SamplingParams(logprobs=2, max_tokens=tokens, ignore_eos=True))
        for i, tokens in enumerate((10, 30))
    ]
    with LLM(models["target"], speculation(models, mode), backend="cuda", **LIMITS) as llm:
        run_together(llm.engine, cases)
        captured: dict[Any, StaticGraph] = llm.engine.executables[0].inner._captured
    logits = [graph.large["logits"] for graph in captured.values() if graph.large]
    assert len(logits) > 1
    assert len({tensor.data_ptr() for tensor in logits}) == 1
    rows = LIMITS["max_batch_size"] * (1 if mode == "none" else K + 1)
    assert logits[0].untyped_storage().nbytes() == rows * VOCAB * 4


@pytest.mark.parametrize("mode", ["none", "draft_model"])
def test_a_graph_without_memory_is_tried_once(
    models: dict[str, Path], work: HostQueue, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a kind whose graph does not fit the memory run kernel by kernel. The graph is not tried again.

    The capture fails after a run with padding, which leaves the tokens of the last step as they were.
    """
    tries = []

    def capture(inner: Any) -> Any:
        tries.append(inner)
        work.submit(inner)
        raise CapacityError("the GPU's memory is full")

    lasting = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    case = Case([1, 2, 3], dataclasses.replace(lasting, ignore_eos=False, min_tokens=29, stop_token_ids=[3]))
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        (outcome,) = run_alone(llm.engine, [case])
    with LLM(models["target"], speculation(models, mode), backend="cuda", **LIMITS) as llm:
        monkeypatch.setattr(work, "capture", capture)
        assert run_alone(llm.engine, [case]) == [outcome]
        assert 1 <= len(tries) < 10
        assert llm.engine.stats.drafter_failures == 0


@pytest.mark.parametrize("mode", ["none", "eagle3", "draft_model"])
def test_graphs_have_block_tables_as_wide_as_the_batch_needs(
    models: dict[str, Path], work: HostQueue, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that grows goes through graphs of more and more columns, whatever the longest possible is."""
    monkeypatch.setattr(cuda_executable, "LEAST_COLUMNS", 2)
    case = Case([1, 2, 3], SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True))
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        (outcome,) = run_alone(llm.engine, [case])
    with LLM(models["target"], speculation(models, mode), backend="cuda", **LIMITS) as llm:
        assert run_alone(llm.engine, [case]) == [outcome]
        captured: dict[Any, StaticGraph] = llm.engine.executables[0].inner._captured
    widths = {graph.staged[0]["block_tables"].shape[1] for graph in captured.values()}
    assert widths == {key[2] for key in captured}
    assert widths >= {2, 8, 16}
    assert {key[2] for key in captured if key[1] > 1} == {2}  # no larger batch has run since the start
