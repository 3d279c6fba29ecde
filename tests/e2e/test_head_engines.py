"""Draft layers next to the target, as engines of AOTInductor's graphs and of ONNX graphs.

They make eager's drafts and outputs, and refuse inputs that graphs would misread. EAGLE inside the target's graph is
here, too, because test_engine.py does not have it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conformance import (
    CASES,
    LIMITS,
    TIGHT,
    K,
    assert_as_planned,
    assert_speculation_changes_nothing,
    assert_words_are_those_of_eager,
    build,
    make_models,
    wishes,
)
from tests.e2e.tiny import Outcome, run_alone
from trtspec import LLM
from trtspec.backends.compiled import CompiledExecutable
from trtspec.build.plan import plan_build
from trtspec.config.engine import EngineConfig
from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs
from trtspec.engine.stats import TimedExecutable
from trtspec.errors import EngineError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.head_drafter import HeadDrafter
from trtspec.sampling_params import RequestSampling

pytestmark = pytest.mark.long  # each engine has three graphs to compile

MODE = "eagle3_two_engine"
WIDTH = 3 * 32  # three hidden states


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def built(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(backend, mode) -> an engine folder, built when first asked for."""
    folder = tmp_path_factory.mktemp("engines")
    return functools.cache(lambda backend, mode: build(models, folder / f"{backend}-{mode}", backend, mode, "float32"))


@pytest.fixture(scope="module", params=["aoti", "onnx"])
def engine(built: Callable[[str, str], Path], request: pytest.FixtureRequest) -> Path:
    return built(request.param, MODE)


@pytest.fixture(scope="module")
def plain(models: Path) -> list[Outcome]:
    """The outcomes of plain decoding for CASES, one case at a time."""
    return run_alone(LLM(models / "target", num_kv_blocks=128, **LIMITS).engine, CASES)


@pytest.mark.parametrize("mode", [MODE, "eagle_two_engine", "eagle"])
@pytest.mark.parametrize("backend", ["aoti", "onnx"])
def test_the_words_and_drafts_are_those_of_eager(
    built: Callable[[str, str], Path], models: Path, plain: list[Outcome], backend: str, mode: str
) -> None:
    """Outcomes and accepted drafts are those of eager, packed and one at a time.

    Prompts come in chunks, for which no drafts are made.
    """
    assert_speculation_changes_nothing(LLM(built(backend, mode), **TIGHT), plain, mode)
    assert_words_are_those_of_eager(built(backend, mode), models, mode, plain)


def test_the_engine_is_as_planned(built: Callable[[str, str], Path], models: Path) -> None:
    engine = built("aoti", MODE)
    config = EngineConfig(backend="aoti", dtype="float32", **LIMITS)
    plan = plan_build(models / "target", read_speculative_config(wishes(MODE, models, False)), config)
    for role, written in assert_as_planned(plan, engine).items():
        made = plan.executables[role]
        unread = {"target": 0, "draft": 13 * 8}[role]  # target_ids: graphs read their distance, d2t
        assert sum(written.values()) == sum(made.weights.values()) + made.tables - unread


def head_of(engine: Path) -> CompiledExecutable:
    drafter = LLM(engine, **TIGHT).engine.loop.proposer.drafter
    assert isinstance(drafter, HeadDrafter)
    assert drafter.draft_lens == (0, K)
    assert isinstance(drafter.head, TimedExecutable)
    assert isinstance(drafter.head.inner, CompiledExecutable)
    return drafter.head.inner


def head_inputs(draft_len: int) -> StepInputs:
    """Inputs with rows of two requests, 3 and 2."""
    attn = AttnMetadata.of([3, 2], [3, 6], [[1, 2], [3, 4]])
    greedy = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    spec = SpecMetadata.plain((0, 1), attn, SamplingTensors.of([greedy] * 2, [3, 6]), draft_len)
    states = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    return StepInputs(torch.ones(5, dtype=torch.int64), attn, spec, states)


def test_a_graph_of_longer_chains_serves_shorter_ones(engine: Path) -> None:
    """A graph of a longer chain serves a shorter one, with its first drafts. With 0 drafts requested, none are made."""
    head = head_of(engine)
    made = []
    for length in range(K + 1):
        proposal = head.run(head_inputs(length)).proposal
        assert proposal is not None
        assert proposal.draft_lens.tolist() == [length] * 2
        assert proposal.draft_tokens.shape == (2, length)
        made.append(proposal.draft_tokens)
    assert all(torch.equal(short, made[K][:, :length]) for length, short in enumerate(made))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: replace(i, hidden_states=i.hidden_states.bfloat16()), "hidden_states is torch.bfloat16 .*float32"),
        (lambda i: replace(i, hidden_states=i.hidden_states[:, :64].contiguous()), r"has shape \[5, 64\].*\[5, 96\]"),
        (lambda i: replace(i, hidden_states=i.hidden_states[1:]), r"has shape \[4, 96\], the graph takes \[5, 96\]"),
        (lambda i: replace(i, hidden_states=i.hidden_states.t().contiguous().t()), "hidden_states .*strides"),
        (lambda i: replace(i, spec=replace(i.spec, next_draft_len=K + 1)), "graphs for K = 0, 3; .* wants 4 drafts"),
    ],
    ids=["dtype", "width", "rows", "stride", "K"],
)
def test_inputs_a_graph_would_misread_are_refused(
    engine: Path, change: Callable[[Any], StepInputs], message: str
) -> None:
    head, inputs = head_of(engine), head_inputs(K)
    head.run(inputs)
    with pytest.raises(EngineError, match=message):
        head.run(change(inputs))
