"""EAGLE3 heads that the speculators package wrote, against its own classes in fp32.

`make contract-speculators` sets SPECULATORS_PATH to a folder with the package and its imports. Without it all tests are
skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checkpoints import make_checkpoint
from tests.models.eagle3_heads import EAGLE3, build_step
from trtspec import LLM, SamplingParams
from trtspec.methods.eagle3.head import Eagle3Head

PACKAGES = os.environ.get("SPECULATORS_PATH", "")
pytestmark = pytest.mark.skipif(not PACKAGES, reason="needs what `make contract-speculators` gets")

IDS = [2, 5, 8]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab_size": 83},
    "all ids": {"draft_vocab_size": 199, "norm_before_residual": True},
    "norm before fc": {"draft_vocab_size": 83, "norm_before_fc": True, "norm_before_residual": True},
    "norm of each": {"draft_vocab_size": 83, "fc_norm": True},
    "normed output": {"draft_vocab_size": 83, "norm_output": True, "fc_norm": True},
    "qwen3": {"draft_vocab_size": 83, "norm_before_fc": True, "layer": {"model_type": "qwen3"}},
    "biases": {"draft_vocab_size": 83, "layer": {"attention_bias": True, "rms_norm_eps": 1e-5}},
    "int4": {"draft_vocab_size": 83, "norm_before_fc": True, "bits": 4},
    "int8, biases": {"draft_vocab_size": 83, "bits": 8, "layer": {"attention_bias": True}},
    "int4, lm_head too": {"draft_vocab_size": 199, "bits": 4, "ignore": ["verifier_lm_head"]},
    "int4, named": {"draft_vocab_size": 83, "bits": 4, "ignore": ["fc", "re:.*lm_head", "re:layers\\.0\\.self_attn"]},
}


class Rows:
    """Attention of the newest rows over all rows of one sequence."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        keys, values = (torch.cat(parts).transpose(0, 1)[None] for parts in (self.keys, self.values))
        new, total = q.shape[0], keys.shape[2]
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(q.shape)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=8, initializer_range=0.06)


@pytest.mark.parametrize("case", CASES)
def test_a_head_computes_what_the_package_does(tmp_path: Path, deep: Path, case: str) -> None:
    """A head computes what the package does, in two passes.

    The first pass reads the target's states. The second is a row that reads the first's output at the row before it.
    """
    folder = written(tmp_path / "head", deep, CASES[case])
    oracle = np.load(folder / "oracle.npz")
    ids, states, expected = (torch.from_numpy(oracle[name]) for name in ("ids", "states", "logits"))
    step = build_step(deep, folder)
    assert step.worker.capture_layers == tuple(i - 1 for i in IDS)
    head = step.worker.head
    assert isinstance(head, Eagle3Head)
    for end in (1, 7, len(ids) - 1):
        rows, positions = Rows(), torch.arange(end)
        with torch.no_grad():
            first = head(ids[:end], head.fuse(states[:end]), positions, rows)
            second = head(ids[end : end + 1], first[-1:], positions[-1:] + 1, rows)
            found = head.logits(first), head.logits(second)
        assert_close(found[0], expected[0, :end], CASES[case])
        assert_close(found[1], expected[1, end - 1 : end], CASES[case])
    assert_lossless(deep, {**EAGLE3, "model": str(folder)})


def test_a_parallel_head_is_read(tmp_path: Path, deep: Path) -> None:
    options = {"draft_vocab_size": 83, "mask_token_id": 3, "layer": {"num_hidden_layers": 2}, "norm_before_fc": True}
    folder = written(tmp_path / "head", deep, options)
    assert_lossless(deep, {**EAGLE3, "model": str(folder), "parallel_drafting": True})


def assert_close(found: Tensor, expected: Tensor, options: dict[str, Any]) -> None:
    """Check that both are close; with integers, numbers halfway between two may round the other way.

    For one row the difference may be 1 %.
    """
    if "bits" in options:
        assert (found - expected).norm() <= 2e-2 * expected.norm()
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def written(
    folder: Path, target: Path, options: dict[str, Any], oracle: str = "", ids: str = "eagle_aux_hidden_state_layer_ids"
) -> Path:
    """Write a head by the package, in a process of its own -> folder."""
    if "bits" in options:
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed; it needs Python 3.11")
    script = str(Path(__file__).with_name(oracle or "speculators_oracle.py"))
    command = [sys.executable, script, str(target), str(folder), json.dumps({ids: IDS, **options})]
    environment = {**os.environ, "PYTHONPATH": PACKAGES}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def assert_lossless(target: Path, speculation: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    texts = []
    for config in (None, speculation):
        with LLM(target, config, backend="eager", max_batch_size=2) as llm:
            texts.append([output.outputs[0].token_ids for output in llm.generate([[5, 6, 7], [8, 9]], params, False)])
    assert texts[0] == texts[1]
