"""Draft heads of random weights for a target's checkpoint, in their public layouts.

They are heads of EAGLE3, EAGLE, DFlash, Medusa and MLP speculators.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def make_eagle3(
    tmp_path: Path,
    target: Path,
    capture: Sequence[int] | None = None,
    target_ids: Sequence[int] | None = None,
    *,
    name: str = "eagle3",
    seed: int = 0,
    num_captured: int = 3,
    own_embedding: bool = False,
    own_head: bool = True,
    qk_norm: bool = False,
    num_layers: int = 1,
    mask: int | None = None,
    speculators: bool = False,
    **fields: Any,
) -> Path:
    """Write a random EAGLE3 head for the checkpoint `target` in the public layout, and return its folder.

    capture: layers "after layer i", written as vLLM's ids, one higher; None = the config says nothing. target_ids: the
    target's id of each draft id; None = all, and then neither d2t nor t2d is written. mask: the mask token of a P-EAGLE
    head, which may have more than one layer. speculators: whether the layout is that package's. fields: those of
    config.json.
    """
    theirs = json.loads((target / "config.json").read_text())
    config = {
        **{key: value for key, value in theirs.items() if key != "layer_types"},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "target_hidden_size": theirs["hidden_size"],
        "tie_word_embeddings": False,
        **({} if target_ids is None else {"draft_vocab_size": len(target_ids)}),
        **({} if mask is None else {"ptd_token_id": mask}),
        **({} if capture is None else {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in capture]}),
        **fields,
    }
    vocab, hidden, width = (config[name] for name in ("vocab_size", "hidden_size", "head_dim"))
    fused = config["target_hidden_size"] * (num_captured if capture is None else len(capture))
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, fused),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.hidden_norm": (hidden,),
        **_layer_shapes(config, "midlayer.", 2 * hidden),
        "norm": (hidden,),
    }
    for i in range(1, num_layers):
        shapes |= {f"layers.{i}.input_layernorm": (hidden,), **_layer_shapes(config, f"layers.{i}.", hidden)}
    if qk_norm:
        shapes |= {"midlayer.self_attn.q_norm": (width,), "midlayer.self_attn.k_norm": (width,)}
    if config.get("norm_before_fc"):
        shapes["input_norm"] = (fused,)
    if config.get("fc_norm"):
        size = config["target_hidden_size"]
        shapes |= {f"fc_norm.{i}": (size,) for i in range(fused // size)}
    if own_embedding:
        shapes["embed_tokens"] = (vocab, hidden)
    if own_head:
        shapes["lm_head"] = (vocab if target_ids is None else len(target_ids), hidden)
    tensors = _random_tensors(shapes, config, seed)
    if mask is not None:
        generator = torch.Generator().manual_seed(seed + 1)
        tensors["mask_hidden"] = torch.randn(1, 1, fused, generator=generator)
    if target_ids is not None:
        tensors["d2t"] = torch.tensor(target_ids) - torch.arange(len(target_ids))
        tensors["t2d"] = torch.isin(torch.arange(vocab), torch.tensor(target_ids))
    if speculators:
        tensors = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
        config = _of_speculators(config, mask)
    return _write(tmp_path / name, tensors, config)


def _of_speculators(config: dict[str, Any], mask: int | None) -> dict[str, Any]:
    """config.json of an EAGLE3 head, or with a mask of a P-EAGLE head, as the package speculators writes it."""
    own = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = {key: value for key, value in config.items() if key != "ptd_token_id"}
    return {
        "architectures": ["Eagle3DraftModel" if mask is None else "PEagleDraftModel"],
        "speculators_model_type": "eagle3" if mask is None else "peagle",
        **({} if mask is None else {"mask_token_id": mask}),
        "norm_before_residual": False,
        **{key: config[key] for key in own if key in config},
        "transformer_layer_config": {key: value for key, value in config.items() if key not in own},
    }


def make_eagle(
    tmp_path: Path,
    target: Path,
    *,
    name: str = "eagle",
    seed: int = 0,
    fc_bias: bool = False,
    embedding: str = "absent",
    head: str = "absent",
    qk_norm: bool = False,
    wrapped: bool = False,
    **fields: Any,
) -> Path:
    """Write a random head of the original EAGLE for the checkpoint `target` in the public layout; return its folder.

    embedding, head: "absent", "own", or "copied" from the target. wrapped: whether config.json is in vLLM's wrapper.
    fields: those of the plain config.json; num_hidden_layers is 1 unless given.
    """
    theirs = json.loads((target / "config.json").read_text())
    config = {
        **{key: value for key, value in theirs.items() if key != "layer_types"},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        **fields,
    }
    vocab, hidden, width = (config[name] for name in ("vocab_size", "hidden_size", "head_dim"))
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, 2 * hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= _layer_shapes(config, prefix, hidden)
        if layer:
            shapes[f"{prefix}input_layernorm"] = (hidden,)
        if qk_norm:
            shapes |= {f"{prefix}self_attn.q_norm": (width,), f"{prefix}self_attn.k_norm": (width,)}
    own = {"embed_tokens": embedding, "lm_head": head}
    shapes |= {key: (vocab, hidden) for key, kind in own.items() if kind == "own"}
    tensors = _random_tensors(shapes, config, seed)
    if fc_bias:
        tensors["fc.bias"] = torch.randn(hidden, generator=torch.Generator().manual_seed(seed + 1)) / 2
    copied = load_file(target / "model.safetensors")
    copied.setdefault("lm_head.weight", copied["model.embed_tokens.weight"])
    if embedding == "copied":
        tensors["embed_tokens.weight"] = copied["model.embed_tokens.weight"].clone()
    if head == "copied":
        tensors["lm_head.weight"] = copied["lm_head.weight"].clone()
    return _write(tmp_path / name, tensors, {"model_type": "eagle", "model": config} if wrapped else config)


def make_dflash(
    tmp_path: Path,
    target: Path,
    capture: Sequence[int],
    mask: int,
    *,
    name: str = "dflash",
    seed: int = 0,
    num_layers: int = 2,
    **fields: Any,
) -> Path:
    """Write a random DFlash draft for the checkpoint `target` in z-lab's layout, and return its folder.

    capture: layers "after layer i". mask: its mask token. fields: those of config.json.
    """
    theirs = json.loads((target / "config.json").read_text())
    config = {
        **{key: value for key, value in theirs.items() if key != "layer_types"},
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "num_target_layers": theirs["num_hidden_layers"],
        "tie_word_embeddings": False,
        "block_size": 8,
        "dflash_config": {"target_layer_ids": list(capture), "mask_token_id": mask},
        **fields,
    }
    hidden, width = config["hidden_size"], config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, len(capture) * hidden), "hidden_norm": (hidden,)}
    for i in range(num_layers):
        prefix = f"layers.{i}."
        shapes |= {f"{prefix}input_layernorm": (hidden,), **_layer_shapes(config, prefix, hidden)}
        shapes |= {f"{prefix}self_attn.q_norm": (width,), f"{prefix}self_attn.k_norm": (width,)}
    shapes["norm"] = (hidden,)
    return _write(tmp_path / name, _random_tensors(shapes, config, seed), config)


def _layer_shapes(config: dict[str, Any], prefix: str, in_features: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one decoder layer, except input_layernorm. in_features: input width of q, k and v."""
    hidden, inner, width = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, in_features),
        "self_attn.k_proj": (keys, in_features),
        "self_attn.v_proj": (keys, in_features),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def _random_tensors(shapes: dict[str, tuple[int, ...]], config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Weights of these shapes, and the biases that config.json asks for."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, shape in shapes.items():
        random = torch.randn(shape, generator=generator)
        tensors[f"{key}.weight"] = 1 + random / 4 if len(shape) == 1 else random * (2 * shape[1]) ** -0.5
        has_bias = (config.get("attention_bias") and ".self_attn." in key) or (
            config.get("mlp_bias") and ".mlp." in key
        )
        if has_bias and len(shape) == 2:
            tensors[f"{key}.bias"] = torch.randn(shape[:1], generator=generator) / 2
    return tensors


def make_medusa(
    tmp_path: Path,
    target: Path,
    *,
    name: str = "medusa",
    seed: int = 0,
    num_heads: int = 5,
    num_layers: int = 1,
    num_lm_heads: int | None = None,
    bias: bool = False,
    token_map: Sequence[int] | None = None,
    fasterdecoding: bool = False,
    **fields: Any,
) -> Path:
    """Write random Medusa heads for the checkpoint `target`, and return their folder.

    Layout and config.json are vLLM's, or FasterDecoding's. num_lm_heads: None = one for each head; a smaller number
    needs original_lm_head among `fields`. token_map: the target's id of each draft id, None = all of them. fields:
    those of config.json.
    """
    theirs = json.loads((target / "config.json").read_text())
    hidden, vocab = theirs["hidden_size"], len(token_map) if token_map is not None else theirs["vocab_size"]
    if fasterdecoding:
        config: dict[str, Any] = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
        block, lm_head = "{}.{}.linear", f"{{}}.{num_layers}"
    else:
        config = {key: theirs[key] for key in ("hidden_size", "vocab_size")}
        config |= {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": bias}
        config |= {"num_heads": num_heads, "num_hidden_layers": num_layers}
        block, lm_head = "blocks.{}.layers.{}", "lm_heads.{}"
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            matrix = torch.randn(hidden, hidden, generator=generator) * (hidden / 2) ** -0.5
            tensors[block.format(head, layer) + ".weight"] = matrix
            if bias:
                tensors[block.format(head, layer) + ".bias"] = torch.randn(hidden, generator=generator) / 2
    for head in range(num_heads if num_lm_heads is None else num_lm_heads):
        matrix = torch.randn(vocab, hidden, generator=generator) * (hidden / 8) ** -0.5
        tensors[lm_head.format(head) + ".weight"] = matrix
    if token_map is not None:
        tensors["token_map"], config["truncated_vocab_size"] = torch.tensor(token_map), vocab
    return _write(tmp_path / name, tensors, {**config, **fields})


def make_mlp_speculator(
    tmp_path: Path,
    target: Path,
    *,
    name: str = "mlp_speculator",
    seed: int = 0,
    n_predict: int = 5,
    inner_dim: int = 0,
    tie_weights: bool = False,
    scale_input: bool = False,
    **fields: Any,
) -> Path:
    """Write a random MLP speculator for the checkpoint `target` in the public layout, and return its folder.

    inner_dim: 0 = the target's hidden size. tie_weights: whether tensors that stages share are stored once, under the
    number of the first stage that has them. fields: those of config.json.
    """
    theirs = json.loads((target / "config.json").read_text())
    hidden, vocab = theirs["hidden_size"], theirs["vocab_size"]
    inner = inner_dim or hidden
    config = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": hidden,
        "vocab_size": vocab,
        "inner_dim": inner_dim,
        "n_predict": n_predict,
        "top_k_tokens_per_head": [1] * n_predict,
        "n_candidates": 1,
        "tie_weights": tie_weights,
        "scale_input": scale_input,
        **fields,
    }
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {}
    for i in range(1 if tie_weights else n_predict):
        tensors[f"speculator.emb.{i}.weight"] = random(vocab, inner)
        tensors[f"speculator.head.{i}.weight"] = random(vocab, inner) * (inner / 8) ** -0.5
        tensors[f"speculator.ln.{i}.weight"] = 1 + random(inner) / 4
        tensors[f"speculator.ln.{i}.bias"] = random(inner) / 4
    for i in range(2 if tie_weights else n_predict):
        width = inner if i else hidden
        tensors[f"speculator.proj.{i}.weight"] = random(inner, width) * width**-0.5
    return _write(tmp_path / name, tensors, config)


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """Write a new checkpoint folder."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
