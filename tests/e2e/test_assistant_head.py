"""The EAGLE3 head that is shipped for SmolLM2 has what other engines need.

benchmarks/real.py measures how well it guesses.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

HEAD = Path(__file__).parents[2] / "examples" / "smollm2" / "eagle3"


def test_other_engines_can_load_it() -> None:
    """The head has the layers, names and dtypes that other engines expect.

    llama.cpp's converter always takes these three layers, whatever a config says. It counts a layer by its input.
    """
    config = json.loads((HEAD / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30 // 2, 30 - 3]
    assert (config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]) == (576, 49152, 8192)
    with safe_open(HEAD / "model.safetensors", "pt") as file:
        names = set(file.keys())
        d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
        weights = [file.get_tensor(name) for name in names - {"d2t", "t2d"}]
    assert not any("embed" in name for name in names)
    assert (torch.arange(8192) + d2t).tolist() == t2d.nonzero()[:, 0].tolist()
    assert all(weight.dtype == torch.bfloat16 for weight in weights)
    assert sum(weight.numel() * 2 for weight in weights) <= 19.62e6
