"""A one-engine step exported once: the graph gives the eager step's bits for every batch the engine makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.e2e.recorded import DRAFT_IDS, Recorder, cases_of, copied
from tests.e2e.tiny import VOCAB
from trtspec.backends.export import export_step, graph_inputs, graph_outputs, input_names
from trtspec.core import KVLayer, StepInputs
from trtspec.workers.step import OneEngineStep


def exportable(inputs: StepInputs, uniform: bool) -> bool:
    """Two or more of everything that stays open."""
    return inputs.spec.num_generations > 1 and (uniform or inputs.spec.num_contexts > 1)


def assert_equal_kv(left: list[KVLayer], right: list[KVLayer]) -> None:
    for layer, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a[0], b[0]), f"keys of layer {layer}"
        assert torch.equal(a[1], b[1]), f"values of layer {layer}"


@pytest.mark.parametrize(
    ("sampling", "uniform", "functional"),
    [
        pytest.param("greedy", True, False, id="greedy-uniform-mutating"),
        pytest.param("greedy", False, True, id="greedy-ragged-functional"),
        pytest.param("sampled", True, True, id="sampled-uniform-functional"),
        pytest.param("sampled", False, False, id="sampled-ragged-mutating"),
    ],
)
def test_the_graph_is_the_step(recorders: dict[str, Recorder], sampling: str, uniform: bool, functional: bool) -> None:
    """One export of one example; then every recorded batch of other sizes, bit for bit, KV included."""
    recorder = recorders[sampling]
    cases = cases_of(recorder, uniform)
    example = next(step for step in cases if exportable(step[0], uniform))
    eager = recorder.inner.step
    step = OneEngineStep(eager.decoder, eager.worker, functional=functional)
    program = export_step(step, example[0], copied(example[1]), uniform)
    graph, names = program.module(), input_names(step, uniform)
    sizes = set()
    for inputs, before, outputs, after in cases:
        kv = copied(before)
        got, new_kv = graph(graph_inputs(inputs, names), kv)
        assert tuple(got) == step.outputs
        for name, want in graph_outputs(outputs).items():
            assert torch.equal(got[name], want), name
        assert_equal_kv(new_kv if functional else kv, after)
        if functional:
            assert_equal_kv(kv, before)
        sizes.add((inputs.spec.num_contexts, inputs.spec.num_generations))
    assert (0, 1) in sizes  # a request alone
    assert len(sizes) >= (4 if uniform else 9)


def test_graphs_call_only_our_ops_for_the_heavy_work(recorders: dict[str, Recorder]) -> None:
    """Attention, linears, sampling and acceptance stay single nodes that a plugin can take over."""
    recorder = recorders["sampled"]
    inputs, before, _, _ = next(s for s in cases_of(recorder, False) if exportable(s[0], False))
    program = export_step(recorder.inner.step, inputs, before)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    ops = {name.split(".")[1] for name in called if name.startswith("trtspec.")}
    assert ops == {"packed_linear", "spec_attention_", "process_logits", "spec_sample", "spec_accept"}
    assert not any(name.startswith(("aten.mm", "aten.linear", "aten.scaled_dot", "aten.argmax")) for name in called)


def test_k_is_a_graph_of_its_own(recorders: dict[str, Recorder]) -> None:
    """K' = 0 still runs the draft layers once over all rows, to keep their KV current, and drafts nothing."""
    recorder = recorders["greedy"]
    inputs, before, outputs, _ = next(s for s in cases_of(recorder, True) if exportable(s[0], True))
    kv = copied(before)
    none = replace(inputs, spec=replace(inputs.spec, next_draft_len=0))
    program = export_step(recorder.inner.step, none, copied(before), uniform=True)
    got, _ = program.module()(graph_inputs(none, input_names(recorder.inner.step, uniform=True)), kv)
    assert got["next_draft_tokens"].shape == (inputs.spec.batch_size, 0)
    assert torch.equal(got["new_tokens"], graph_outputs(outputs)["new_tokens"])
    draft_layer = recorder.inner.step.decoder.spec.num_layers
    assert not torch.equal(kv[draft_layer][0], before[draft_layer][0])


def test_every_draft_stays_in_the_draft_vocabulary(recorders: dict[str, Recorder]) -> None:
    """So the graphs above really went through d2t."""
    drafted = torch.cat([s[2].proposal.draft_tokens.flatten() for s in cases_of(recorders["sampled"], False)])
    assert set(drafted.tolist()) <= set(DRAFT_IDS.tolist())
    assert drafted.max() < VOCAB
