"""Reader of config.json as the speculators package writes it, with the head's layer in `transformer_layer_config`.

Source: vllm-project/speculators, models/*/config.py. Source for the fields that may be missing: vLLM's
transformers_utils/configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtspec.config.checkpoint.reader import Reader

_KIND = "speculators_model_type"
_ARCHITECTURES = {
    ("eagle3", "llama"): "LlamaForCausalLMEagle3",
    ("eagle3", "qwen3"): "Qwen3ForCausalLMEagle3",
    ("peagle", "llama"): "PeagleLlamaForCausalLM",
    ("dflash", "qwen3"): "DFlashDraftModel",
    ("dflash", "llama"): "DFlashDraftModel",  # its layers are Qwen3's nevertheless
}
"""(kind of speculator, model_type of its layer) -> architecture that public heads of that kind name."""
_READ_ELSEWHERE = ("dspark", "mtp")
"""Kinds whose own readers in methods/ read this layout."""
_FIELDS = (
    _KIND,
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_state_layer_ids",
    "block_size",
    "sample_from_anchor",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "mask_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
)
"""Fields next to the layer that mean the same in the files of other heads."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
"""Defaults of transformers by model_type. Some versions omit fields of the layer that equal them."""


def plain_config(read: Reader) -> Reader:
    """Return the config of such a file with the field names of other heads; any other config as it is.

    A speculator of _READ_ELSEWHERE also stays as it is. Raises CheckpointError if there is no layer, UnsupportedError
    for a layer or a speculator of another kind.
    """
    kinds = dict.fromkeys(kind for kind, _ in _ARCHITECTURES)
    if read.get(_KIND) not in kinds:
        if read.get(_KIND) not in (None, *_READ_ELSEWHERE) and read.get("transformer_layer_config") is not None:
            raise read.unsupported(_KIND, f"these are not built; supported: {', '.join([*kinds, 'dspark'])}")
        return read
    layer = read.object("transformer_layer_config")
    if layer is None:
        raise read.error("transformer_layer_config", f"is missing; a config with {_KIND} has the head's layer there")
    inner = read.sub("transformer_layer_config", layer)
    kind = read.string(_KIND)
    model_type = inner.string("model_type", "qwen3" if kind == "dflash" else "llama")
    if (kind, model_type) not in _ARCHITECTURES:
        known = ", ".join(layer for own, layer in _ARCHITECTURES if own == kind)
        raise inner.unsupported("model_type", f"layers of {kind} heads that run: {known}")
    said = {name: read.get(name) for name in _FIELDS if read.get(name) is not None}
    plain = {
        **_DEFAULTS[model_type],
        **{name: value for name, value in layer.items() if value is not None and name != "quantization_config"},
        "norm_before_residual": kind == "eagle3",  # vLLM's default if the file does not say
        **said,
        "architectures": [_ARCHITECTURES[kind, model_type]],
        "model_type": model_type,
        "tie_word_embeddings": False,
    }
    return Reader(plain, read.file, read.role)
