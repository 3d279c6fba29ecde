"""Steps of whole runs, recorded for tests of what a step is exported to: what went in, what came out, KV around it."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from tests.e2e.tiny import Case, add_tokenizer, make_target, motif_prompt, run_together
from trtspec import LLM, SamplingParams
from trtspec.backends.eager import EagerExecutable
from trtspec.config.model import ModelConfig
from trtspec.core import KVLayer, StepInputs, StepOutputs
from trtspec.models.weights import load_decoder
from trtspec.train.eagle3 import new_head
from trtspec.train.eagle3_run import export_eagle3

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


def cases_of(recorder: Recorder, uniform: bool) -> list[tuple[StepInputs, list[KVLayer], StepOutputs, list[KVLayer]]]:
    """The recorded steps that verify and make K drafts."""
    return [
        step
        for step in recorder.steps
        if step[0].spec.runtime_draft_len == step[0].spec.next_draft_len == K
        and (is_uniform(step[0]) if uniform else step[0].spec.num_generations)
    ]
