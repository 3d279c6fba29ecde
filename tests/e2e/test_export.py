"""A one-engine step exported once: the graph gives the eager step's bits for every batch the engine makes."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from tests.e2e.tiny import VOCAB, Case, add_tokenizer, make_target, motif_prompt, run_together
from trtspec import LLM, SamplingParams
from trtspec.backends.eager import EagerExecutable
from trtspec.backends.export import export_step, graph_inputs, graph_outputs, input_names
from trtspec.config.model import ModelConfig
from trtspec.core import KVLayer, StepInputs, StepOutputs
from trtspec.models.weights import load_decoder
from trtspec.train.eagle3 import new_head
from trtspec.train.eagle3_run import export_eagle3
from trtspec.workers.step import OneEngineStep

K = 3
DRAFT_IDS = torch.tensor([0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 15])
# Which sampling tensors are in use is part of a graph, so all requests of a run use the same kinds.
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, min_tokens=2)


class Recorder:
    """Runs an eager step and keeps what went in and came out, KV before and after included."""

    def __init__(self, inner: EagerExecutable) -> None:
        self.inner = inner
        self.steps: list[tuple[StepInputs, list[KVLayer], StepOutputs, list[KVLayer]]] = []

    def run(self, inputs: StepInputs) -> StepOutputs:
        before = copied(self.inner.kv)
        outputs = self.inner.run(inputs)
        self.steps.append((deepcopy(inputs), before, outputs, copied(self.inner.kv)))  # their buffers are reused
        return outputs


def copied(kv: object) -> list[KVLayer]:
    return [(k.clone(), v.clone()) for k, v in kv]


@pytest.fixture(scope="module")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorder]:
    """Steps of a whole run of 24 requests, greedy and sampled, in which contexts, chunks and generations mix."""
    folder = tmp_path_factory.mktemp("export")
    target = make_target(folder, num_hidden_layers=3)
    add_tokenizer(target)
    config = ModelConfig.from_folder(target)
    torch.manual_seed(0)
    head = new_head(load_decoder(config, torch.float32), (0, 1, 2), DRAFT_IDS)
    export_eagle3(head, config, (0, 1, 2), folder / "head", torch.float32)
    found = {}
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        rng = random.Random(5)
        cases = [
            Case(motif_prompt(rng), replace(params, seed=rng.randrange(2**63), max_tokens=length))
            for length in (*(rng.randint(6, 30) for _ in range(23)), 60)  # the last ends alone
        ]
        llm = LLM(
            target,
            {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": K},
            max_batch_size=8,
            max_num_tokens=40,
        )
        timed = llm.engine.loop.target
        recorder = found[name] = Recorder(timed.inner)
        timed.inner = recorder
        run_together(llm.engine, cases)
    return found


def is_uniform(inputs: StepInputs) -> bool:
    return inputs.spec.num_contexts == 0 and all(n == K for n in inputs.spec.draft_lens.tolist())


def exportable(inputs: StepInputs, uniform: bool) -> bool:
    """Two or more of everything that stays open."""
    return inputs.spec.num_generations > 1 and (uniform or inputs.spec.num_contexts > 1)


def cases_of(recorder: Recorder, uniform: bool) -> list[tuple[StepInputs, list[KVLayer], StepOutputs, list[KVLayer]]]:
    """The recorded steps that verify and make K drafts."""
    return [
        step
        for step in recorder.steps
        if step[0].spec.runtime_draft_len == step[0].spec.next_draft_len == K
        and (is_uniform(step[0]) if uniform else step[0].spec.num_generations)
    ]


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
