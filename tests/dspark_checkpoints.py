"""Tiny DSpark drafts of random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests import head_checkpoints


def make_dspark(
    tmp_path: Path,
    target: Path,
    capture: Sequence[int],
    mask: int,
    *,
    name: str = "dspark",
    seed: int = 0,
    num_layers: int = 2,
    rank: int = 8,
    markov: str = "vanilla",
    confidence: bool = True,
    confidence_reads_markov: bool | None = None,
    target_ids: Sequence[int] | None = None,
    from_anchor: bool = True,
    deepspec: bool = False,
    **fields: Any,
) -> Path:
    """Write a random DSpark draft for the checkpoint `target` in speculators' or DeepSpec's layout; return its folder.

    capture: layers "after layer i". mask: its mask token. target_ids: the target's id of each draft id, None = all.
    fields: those of config.json. As in both layouts, the draft holds copies of the target's embedding, and of rows of
    its lm_head.
    """
    theirs = json.loads((target / "config.json").read_text())
    layers = {
        **{key: value for key, value in theirs.items() if key not in ("layer_types", "architectures")},
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "tie_word_embeddings": False,
        **{key: fields.pop(key) for key in [*fields] if key in theirs},
    }
    hidden, width, vocab = layers["hidden_size"], layers["head_dim"], layers["vocab_size"]
    with_markov = bool(rank) if confidence_reads_markov is None else confidence_reads_markov
    ids = torch.arange(vocab) if target_ids is None else torch.tensor(target_ids)
    config = {
        "block_size": 8,
        "mask_token_id": mask,
        "markov_rank": rank,
        "markov_head_type": markov,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": with_markov,
    }
    if deepspec:
        config |= {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": list(capture), **layers}
        config["num_target_layers"] = theirs["num_hidden_layers"]
    else:
        config |= {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "aux_hidden_state_layer_ids": [i + 1 for i in capture],
            "draft_vocab_size": len(ids),
            "sample_from_anchor": from_anchor,
            "transformer_layer_config": layers,
        }
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, len(capture) * hidden), "hidden_norm": (hidden,)}
    for i in range(num_layers):
        prefix = f"layers.{i}."
        shapes |= {f"{prefix}input_layernorm": (hidden,), **head_checkpoints._layer_shapes(layers, prefix, hidden)}
        shapes |= {f"{prefix}self_attn.q_norm": (width,), f"{prefix}self_attn.k_norm": (width,)}
    shapes["norm"] = (hidden,)
    tensors = head_checkpoints._random_tensors(shapes, layers, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if rank:
        tensors["markov_head.markov_w1.weight"] = random(vocab, rank)
        tensors["markov_head.markov_w2.weight"] = random(len(ids), rank) / 2
    biased = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
    if rank and markov in biased:
        own, rows, columns = biased[markov]
        tensors[f"markov_head.{own}.weight"] = random(rows, columns) * columns**-0.5
        tensors[f"markov_head.{own}.bias"] = random(rows) / 2
    if confidence:
        columns = hidden + rank * with_markov
        tensors["confidence_head.proj.weight"] = 2 * random(1, columns) * columns**-0.5
        tensors["confidence_head.proj.bias"] = random(1) / 2
    copied = load_file(target / "model.safetensors")
    tensors["embed_tokens.weight"] = copied["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = copied.get("lm_head.weight", copied["model.embed_tokens.weight"])[ids].clone()
    if target_ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return head_checkpoints._write(tmp_path / name, tensors, {**config, **fields})
