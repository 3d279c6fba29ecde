"""Whole engines on the Triton kernels, in Triton's interpreter, generate the ids of the references, drafts or not.

Engines are eager, and of backend cuda with a thread that stands in for the GPU's queue and its CUDA graphs.
The environment chooses the kernels when a process first asks for them, so each choice is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trtspec_plugins.triton import OPS

from tests.async_stand_in import HostQueue
from tests.e2e.tiny import make_target
from tests.head_checkpoints import make_eagle3
from trtspec import LLM, SamplingParams
from trtspec.build import wiring
from trtspec.ops import load_plugins

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
K = 2
DRAFT_IDS = (0, 9, 4, 12, 1, 2, 14, 5, 6, 11, 8)
PROMPTS = [[3, 5, 3, 5, 3, 5, 3], [7, 1], [2, 2, 9, 4]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=12, top_p=0.9, seed=11, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, min_p=0.02, seed=5, max_tokens=6, min_tokens=4, stop_token_ids=[6, 13]),
]
BACKENDS = ("eager", "cuda")
ENVIRONMENTS = {
    "reference": {"TRTSPEC_PLUGINS": "0"},
    "triton": {"TRTSPEC_PLUGINS": "triton", "TRTSPEC_TRITON": "interpret", "TRITON_INTERPRET": "1"},
}


def generate(target: str, head: str) -> None:
    """Print the output of plain decoding and of EAGLE3 for PROMPTS, with the kernels of this process, as JSON."""
    said: dict[str, Any] = {"loaded": sorted(load_plugins())}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    said["kernels"] = [op for op in OPS if has_kernel(f"trtspec::{op}", "CPU")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiring, "open_gpu", lambda: torch.device("cpu"))
        patch.setattr(wiring, "CudaQueue", HostQueue)
        patch.setattr(wiring, "free_memory", lambda device: 10**9)
        for backend in BACKENDS:
            said[backend] = outcomes(target, head, backend)
    print(json.dumps(said))


def outcomes(target: str, head: str, backend: str) -> dict[str, Any]:
    """Outputs and counts of drafts of plain decoding and of EAGLE3 on a backend."""
    said: dict[str, Any] = {}
    speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": K}
    limits: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 64, "max_batch_size": 4}
    for name, config in {"plain": None, "eagle3": speculation}.items():
        with LLM(target, config, backend=backend, **limits) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
            said[name] = [output.outputs[0].token_ids for output in outputs]
            counts = llm.get_metrics().speculation
            said[f"{name} accepted"] = [counts.num_accepted_tokens, counts.num_draft_tokens]
    return said


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Environment -> the output of `generate` there."""
    folder = tmp_path_factory.mktemp("models")
    target = make_target(folder)
    head = make_eagle3(folder, target, (0, 1), DRAFT_IDS)
    code = f"from tests.e2e.test_triton_engine import generate; generate({str(target)!r}, {str(head)!r})"
    found = {}
    for name, environment in ENVIRONMENTS.items():
        asked = {**os.environ, **environment}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=asked, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        found[name] = json.loads(done.stdout)
    return found


def test_the_kernels_are_those_that_were_asked_for(generated: dict[str, dict[str, Any]]) -> None:
    assert generated["reference"]["loaded"] == generated["reference"]["kernels"] == []
    assert generated["triton"]["loaded"] == ["triton"]
    assert generated["triton"]["kernels"] == list(OPS)


@pytest.mark.parametrize("mode", ["plain", "eagle3"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_words_are_the_references(generated: dict[str, dict[str, Any]], backend: str, mode: str) -> None:
    mine, theirs = generated["triton"][backend], generated["reference"][backend]
    assert mine[mode] == theirs[mode]
    assert mine[f"{mode} accepted"] == theirs[f"{mode} accepted"]


@pytest.mark.parametrize("kernels", ENVIRONMENTS)
def test_speculation_changes_nothing(generated: dict[str, dict[str, Any]], kernels: str) -> None:
    for backend in BACKENDS:
        said = generated[kernels][backend]
        assert said["eagle3"] == said["plain"] == generated[kernels]["eager"]["plain"]
        accepted, offered = said["eagle3 accepted"]
        assert 0 < accepted < offered
