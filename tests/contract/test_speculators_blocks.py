"""DFlash drafts that the speculators package wrote, against its own classes in fp32.

As in test_speculators.py, SPECULATORS_PATH names the package.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import edit_config
from tests.contract.test_speculators import IDS, PACKAGES, assert_close, assert_lossless, deep, written
from tests.models.eagle3_heads import build_step
from tests.models.head_session import GREEDY
from trtspec import LLM
from trtspec.core import AttnMetadata, SamplingTensors, SpecMetadata, StepInputs
from trtspec.errors import CheckpointError, TrtSpecError, UnsupportedError
from trtspec.kv.pool import allocate_layers
from trtspec.methods.dflash.worker import DFlashWorker
from trtspec.methods.mtp.checkpoint import MTP_TARGETS
from trtspec.models.attention import PagedAttend

__all__ = ["deep"]
pytestmark = pytest.mark.skipif(not PACKAGES, reason="needs what `make contract-speculators` gets")

MASK, BLOCK = 3, 5
CASES: dict[str, dict[str, Any]] = {
    "all ids": {"draft_vocab_size": 199},
    "fewer ids": {"draft_vocab_size": 83},
    "one layer": {"draft_vocab_size": 199, "layer": {"num_hidden_layers": 1, "rms_norm_eps": 1e-5}},
    "biases": {"draft_vocab_size": 83, "layer": {"attention_bias": True}},
    "int4": {"draft_vocab_size": 83, "bits": 4},
    "int8": {"draft_vocab_size": 199, "bits": 8, "ignore": ["fc", "re:.*lm_head"]},
    "called llama": {"draft_vocab_size": 83, "layer": {"model_type": "llama", "rms_norm_eps": 1e-5}},
}
DFLASH = {"method": "dflash", "num_speculative_tokens": BLOCK - 1}


def draft(folder: Path, target: Path, **options: Any) -> Path:
    words = {"mask_token_id": MASK, "block_size": BLOCK, **options}
    return written(folder, target, words, "speculators_blocks_oracle.py", "aux_hidden_state_layer_ids")


@pytest.mark.parametrize("case", CASES)
def test_a_block_is_what_the_package_makes_of_it(tmp_path: Path, deep: Path, case: str) -> None:
    """Blocks of three texts of different lengths, in one batch, are the package's."""
    folder = draft(tmp_path / "draft", deep, **CASES[case])
    oracle = np.load(folder / "oracle.npz")
    ids, states, expected = (torch.from_numpy(oracle[name]) for name in ("ids", "states", "logits"))
    lengths, B = oracle["anchors"].tolist(), len(expected)
    step = build_step(deep, folder, **DFLASH)
    worker = step.worker
    assert isinstance(worker, DFlashWorker)
    assert worker.capture_layers == tuple(i - 1 for i in IDS)
    layers, first = worker.head.kv_layers, worker.head.first_layer
    attn = AttnMetadata.of(lengths, lengths, [list(range(1 + 8 * b, 9 + 8 * b)) for b in range(B)])
    sampling = SamplingTensors.of([GREEDY] * B, lengths)
    spec = SpecMetadata.plain(range(B), attn, sampling, BLOCK - 1)
    inputs = StepInputs(torch.cat([ids[:n] for n in lengths]), attn, spec)
    caches = allocate_layers((*[layers[0]] * first, *layers), 32, 4, torch.float32)
    attend = PagedAttend(attn, caches, [None] * len(caches))
    with torch.no_grad():
        captured = torch.cat([states[:n] for n in lengths])
        rows, _ = worker.read_in(inputs, captured, ids[lengths][:, None], torch.ones(B, dtype=torch.long), attend)
        found = worker.draft_logits(0, rows).view(B, BLOCK - 1, -1)
    assert_close(found, expected[:, 1:], CASES[case])
    assert_lossless(deep, {**DFLASH, "model": str(folder)})


def test_a_draft_says_itself_what_it_is(deep: Path, plain: Path) -> None:
    """A draft's own config says its method and its length; neither has to be given."""
    worker = build_step(deep, plain, method=None, num_speculative_tokens=None).worker
    assert isinstance(worker, DFlashWorker)
    assert (worker.max_draft_len, worker.mask_token_id) == (BLOCK - 1, MASK)


def test_mtp_layers_of_the_package_are_of_families_that_do_not_run(tmp_path: Path, deep: Path) -> None:
    """MTP layers of the package are refused by name, whether or not the method is given.

    Once the package has a family that runs, this test fails.
    """
    folder = written(tmp_path / "draft", deep, {"mtp": "qwen3"}, "speculators_blocks_oracle.py")
    assert any(name.startswith("mtp_layers.0.") for name in load_file(folder / "model.safetensors"))
    runs = {name for name, row in MTP_TARGETS.items() if row.family is not None}
    assert not runs & set(json.loads((folder / "mtp.json").read_text()))
    for method in ({}, {"method": "mtp"}):
        with pytest.raises(UnsupportedError) as caught, LLM(deep, {"model": str(folder), **method}):
            pass
        assert "model_type='qwen3'" in str(caught.value)
        assert "in the layout of speculators are not built; those of mimo run" in str(caught.value)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], type[TrtSpecError], tuple[str, ...]]] = {
    "sliding layers": (
        {"layer": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8,
                   "use_sliding_window": True}},
        {}, UnsupportedError, ("sliding window", "use a draft of full_attention layers"),
    ),
    "sliding layers of blocks that see all": (
        {"sliding_window_non_causal": True, "layer": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8,
                   "use_sliding_window": True}},
        {}, UnsupportedError, ("sliding window", "use a draft of full_attention layers"),
    ),
    "a guess of the anchor": (
        {"sample_from_anchor": True}, {}, UnsupportedError, ("'sample_from_anchor' = true", "use another draft"),
    ),
    "the embedding": (
        {}, {"aux_hidden_state_layer_ids": [0, 2, 5]}, UnsupportedError, ("aux_hidden_state_layer_ids", "embedding"),
    ),
    "no layers": ({}, {"aux_hidden_state_layer_ids": None}, CheckpointError, ("aux_hidden_state_layer_ids", ">= 1")),
    "no layer": ({}, {"transformer_layer_config": None}, CheckpointError, ("transformer_layer_config", "is missing")),
    "DFlash 2": ({}, {"speculators_model_type": "dflash2"}, UnsupportedError, ("dflash2", "eagle3, peagle, dflash")),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, deep: Path) -> Path:
    return draft(tmp_path_factory.mktemp("plain") / "draft", deep, draft_vocab_size=83)


@pytest.mark.parametrize("what", BAD)
def test_a_draft_of_another_kind_is_an_error_that_helps(tmp_path: Path, deep: Path, plain: Path, what: str) -> None:
    options, changes, error, words = BAD[what]
    folder = tmp_path / "draft"
    if options:
        draft(folder, deep, draft_vocab_size=83, **options)
    else:
        shutil.copytree(plain, folder)
        edit_config(folder, **changes)
    with pytest.raises(error) as caught, LLM(deep, {"model": str(folder), **DFLASH}):
        pass
    assert all(word in str(caught.value) for word in words), caught.value
