"""A one-engine step exported once: the graph returns the eager step's bits for every batch the engine makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.e2e.recorded import DRAFT_IDS, Recorder, assert_graph_is_step, cases_of, copied, exportable
from tests.e2e.tiny import VOCAB
from trtspec.backends.export import export_step
from trtspec.backends.graph_io import graph_inputs, input_names
from trtspec.methods.step import OneEngineStep


@pytest.mark.parametrize(
    ("sampling", "uniform", "functional"),
    [
        pytest.param("greedy", True, False, id="greedy-uniform-mutating", marks=pytest.mark.long),
        pytest.param("greedy", False, True, id="greedy-ragged-functional", marks=pytest.mark.long),
        pytest.param("sampled", True, True, id="sampled-uniform-functional", marks=pytest.mark.long),
        pytest.param("sampled", False, False, id="sampled-ragged-mutating"),
    ],
)
def test_the_graph_is_the_step(recorders: dict[str, Recorder], sampling: str, uniform: bool, functional: bool) -> None:
    eager = recorders[sampling].inner.step
    step = OneEngineStep(eager.decoder, eager.worker, functional=functional)
    assert_graph_is_step(step, recorders[sampling], uniform, functional)


def test_k_is_a_graph_of_its_own(recorders: dict[str, Recorder]) -> None:
    """K' = 0 has a graph of its own, which drafts nothing. It runs the draft layers once over all rows for their KV."""
    recorder = recorders["greedy"]
    inputs, before, outputs, _ = next(s for s in cases_of(recorder, True) if exportable(s[0], True))
    kv = copied(before)
    none = replace(inputs, spec=replace(inputs.spec, next_draft_len=0))
    program = export_step(recorder.inner.step, none, copied(before), uniform=True)
    got, _ = program.module()(graph_inputs(none, input_names(recorder.inner.step, uniform=True)), kv)
    assert got["next_draft_tokens"].shape == (inputs.spec.batch_size, 0)
    assert torch.equal(got["new_tokens"], outputs.verdict.tokens)
    draft_layer = recorder.inner.step.decoder.spec.num_layers
    assert not torch.equal(kv[draft_layer][0], before[draft_layer][0])


def test_every_draft_stays_in_the_draft_vocabulary(recorders: dict[str, Recorder]) -> None:
    """Every draft is in the draft vocabulary, so the graphs above really used d2t."""
    drafted = torch.cat([s[2].proposal.draft_tokens.flatten() for s in cases_of(recorders["sampled"], False)])
    assert set(drafted.tolist()) <= set(DRAFT_IDS.tolist())
    assert drafted.max() < VOCAB
