"""Recorded steps of whole runs, for tests of exported steps: inputs, outputs, and KV before and after."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.e2e.tiny import Case, add_tokenizer, make_target, motif_prompt, run_together
from trtspec import LLM, SamplingParams
from trtspec.backends.eager import EagerExecutable
from trtspec.backends.export import export_step
from trtspec.backends.graph_io import graph_inputs, graph_outputs, input_names, output_names
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.core import KVLayer, StepInputs, StepOutputs
from trtspec.methods.eagle3.train import export_eagle3, new_head
from trtspec.methods.step import OneEngineStep
from trtspec.models.weights import load_decoder

K = 3
DRAFT_IDS = torch.tensor([0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 15])
# The set of sampling tensors in use is part of a graph, so all requests of a run use the same kinds.
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, min_tokens=2)


class Recorder:
    """An eager step that keeps its inputs and outputs, and KV before and after."""

    def __init__(self, inner: EagerExecutable) -> None:
        self.inner = inner
        self.steps: list[tuple[StepInputs, list[KVLayer], StepOutputs, list[KVLayer]]] = []

    def run(self, inputs: StepInputs) -> StepOutputs:
        before = copied(self.inner.kv)
        outputs = self.inner.run(inputs)
        self.steps.append((deepcopy(inputs), before, outputs, copied(self.inner.kv)))  # the inputs' buffers are reused
        return outputs


def copied(kv: object) -> list[KVLayer]:
    return [(k.clone(), v.clone()) for k, v in kv]


def record(make: Callable[..., LLM], name: str) -> Recorder:
    """Record the steps of a run of 24 requests, "greedy" or "sampled", that mixes contexts, chunks and generations.

    make: makes an LLM from limits of an engine; the LLM makes K drafts inside the launch.
    """
    params, rng = {"greedy": GREEDY, "sampled": SAMPLED}[name], random.Random(5)
    cases = [
        Case(motif_prompt(rng), replace(params, seed=rng.randrange(2**63), max_tokens=length))
        for length in (*(rng.randint(6, 30) for _ in range(23)), 60)
    ]
    if params.min_tokens:
        cases[-1] = replace(cases[-1], params=replace(cases[-1].params, min_tokens=50))  # the last one ends alone
    llm = make(max_batch_size=8, max_num_tokens=40)
    timed: Any = llm.engine.loop.target
    recorder = timed.inner = Recorder(timed.inner)
    run_together(llm.engine, cases)
    return recorder


@pytest.fixture(scope="module")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorder]:
    """Recorded runs of EAGLE3, by name."""
    folder = tmp_path_factory.mktemp("export")
    target = make_target(folder, num_hidden_layers=3)
    add_tokenizer(target)
    config = ModelConfig.from_folder(target)
    torch.manual_seed(0)
    head = new_head(load_decoder(config, torch.float32), (0, 1, 2), DRAFT_IDS)
    export_eagle3(head, config, (0, 1, 2), folder / "head", torch.float32)
    speculation = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": K}
    return {name: record(lambda **limits: LLM(target, speculation, **limits), name) for name in ("greedy", "sampled")}


def is_uniform(inputs: StepInputs) -> bool:
    return inputs.spec.num_contexts == 0 and all(n == K for n in inputs.spec.draft_lens.tolist())


def cases_of(recorder: Recorder, uniform: bool) -> list[tuple[StepInputs, list[KVLayer], StepOutputs, list[KVLayer]]]:
    """The recorded steps that verify K drafts and make K drafts."""
    return [
        step
        for step in recorder.steps
        if step[0].spec.runtime_draft_len == step[0].spec.next_draft_len == K
        and (is_uniform(step[0]) if uniform else step[0].spec.num_generations)
    ]


def exportable(inputs: StepInputs, uniform: bool) -> bool:
    """Whether the step has at least two of everything whose size stays open in the export."""
    return inputs.spec.num_generations > 1 and (uniform or inputs.spec.num_contexts > 1)


def assert_equal_kv(left: Sequence[KVLayer], right: Sequence[KVLayer]) -> None:
    for layer, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a[0], b[0]), f"keys of layer {layer}"
        assert torch.equal(a[1], b[1]), f"values of layer {layer}"


def assert_graph_is_step(step: OneEngineStep, recorder: Recorder, uniform: bool, functional: bool) -> None:
    """Export the step once, from one example, and compare the graph with every recorded batch of other sizes.

    Outputs and KV must be equal bit for bit. step: the recorded step, or its functional form.
    """
    cases = cases_of(recorder, uniform)
    example = next(one for one in cases if exportable(one[0], uniform))
    program = export_step(step, example[0], copied(example[1]), uniform)
    graph, names = program.module(), input_names(step, uniform)
    sizes = set()
    for inputs, before, outputs, after in cases:
        kv = copied(before)
        got, new_kv = graph(graph_inputs(inputs, names), kv)
        assert tuple(got) == output_names(step)
        for name, want in graph_outputs(outputs, output_names(step)).items():
            assert torch.equal(got[name], want), name
        assert_equal_kv(new_kv if functional else kv, after)
        if functional:
            assert_equal_kv(kv, before)
        sizes.add((inputs.spec.num_contexts, inputs.spec.num_generations))
    assert (0, 1) in sizes  # one request alone
    assert len(sizes) >= (3 if uniform else 9)
