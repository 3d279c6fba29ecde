"""Tiny DSpark drafts and inputs for them, the same on every machine.

dspark_oracle.npz records what the package `speculators` computes for them; dspark_oracle.py makes that file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import head_checkpoints
from tests.dspark_checkpoints import make_dspark

RECORDED = Path(__file__).with_name("dspark_oracle.npz")
BLOCK, MASK, VOCAB, HIDDEN, LAYERS = 5, 63, 64, 32, (0, 1, 3)
LENGTHS = (12, 7, 1)
"""Positions of the anchors; a block reads the states before its anchor."""

CASES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "fill-in": {"from_anchor": False},
    "fill-in, rnn": {"from_anchor": False, "markov": "rnn"},
    "reduced vocabulary": {"target_ids": tuple(range(1, VOCAB, 3))},
    "no Markov head": {"rank": 0},
    "confidence of the block alone": {"confidence_reads_markov": False},
    "no confidence head": {"confidence": False},
    "one state, biases": {"capture": (2,), "attention_bias": True, "num_layers": 1},
}


def make_target(folder: Path) -> Path:
    """Make a Qwen3 of four layers, without transformers: its random weights may differ between its versions."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    shapes: dict[str, tuple[int, ...]] = {"model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
    for i in range(4):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}input_layernorm": (HIDDEN,), **head_checkpoints._layer_shapes(config, prefix, HIDDEN)}
        shapes |= {f"{prefix}self_attn.q_norm": (8,), f"{prefix}self_attn.k_norm": (8,)}
    tensors = head_checkpoints._random_tensors(shapes, config, 3)
    tensors["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(4))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_case(tmp_path: Path, target: Path, name: str, **fields: Any) -> Path:
    """Make the draft called `name`; `fields` are fields of config.json."""
    asked = {"capture": LAYERS, **CASES[name], **fields}
    return make_dspark(tmp_path, target, asked.pop("capture"), MASK, block_size=BLOCK, seed=5, **asked)


def inputs(name: str) -> tuple[Tensor, Tensor]:
    """Return stand-ins for the target's states [T, n * H] at positions 0 .. T-1, and the text [T + 1] int64."""
    width, length = len(CASES[name].get("capture", LAYERS)) * HIDDEN, max(LENGTHS)
    generator = torch.Generator().manual_seed(6)
    states = torch.randn(length, width, generator=generator)
    return states, torch.randint(0, MASK, (length + 1,), generator=generator)
