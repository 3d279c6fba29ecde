"""Write a Llama checkpoint as one GGUF file (version 3), weights unchanged. Standard library and numpy only.

The layout begins with magic, version and counts, then typed key-value pairs. Then come name, shape (innermost first),
type and offset of each tensor. The tensors follow, each at a multiple of 32 bytes.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ALIGNMENT = 32
_UINT32, _FLOAT32, _STRING = 4, 6, 8  # types of values
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # of the whole file, with llama.cpp's names
_TENSOR_TYPES = {"F32": 0, "F16": 1, "BF16": 30}
_NUMPY = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint; `bits` holds BF16 as uint16."""

    kind: str  # F32, F16 or BF16
    bits: Array


def write_gguf(checkpoint: Path, output: Path) -> None:
    """Write `checkpoint`, a Hugging Face folder of a plain Llama, as GGUF. ValueError for any other model."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or config.get("rope_scaling") or config.get("attention_bias"):
        raise ValueError(f"{checkpoint}: only a Llama without rope scaling and biases is written as GGUF")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {}
    for name, tensor in read_safetensors(checkpoint).items():
        new = gguf_name(name)
        if new.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = Tensor(tensor.kind, interleave_rope(tensor.bits, heads if "attn_q" in new else kv_heads))
        elif tensor.bits.ndim == 1:
            tensor = Tensor("F32", to_float32(tensor))  # the dtype that llama.cpp wants for norms
        tensors[new] = tensor
    kinds = {tensor.kind for tensor in tensors.values() if tensor.bits.ndim == 2}
    if len(kinds) != 1:
        raise ValueError(f"{checkpoint}: weights of several types ({', '.join(sorted(kinds))})")
    write_tensors(output, metadata(config, kinds.pop()), tensors)


def metadata(config: dict[str, Any], kind: str) -> dict[str, str | int | float]:
    """Key-value pairs that llama.cpp needs to load the model. There is no tokenizer: prompts are ids."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "general.architecture": "llama",
        "general.file_type": _FILE_TYPES[kind],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.dimension_count": head_dim,
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "none",
    }


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of a Hugging Face checkpoint. ValueError if it has none."""
    stem = name.removesuffix(".weight")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.weight"
    prefix, _, rest = stem.removeprefix("model.layers.").partition(".")
    if prefix.isdigit() and rest in _INNER:
        return f"blk.{prefix}.{_INNER[rest]}.weight"
    raise ValueError(f"tensor {name} has no place in a Llama GGUF file")


def interleave_rope(weight: Array, heads: int) -> Array:
    """Rows of a q or k projection in llama.cpp's order: pairs (2i, 2i+1) instead of (i, i + head_dim / 2)."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def to_float32(tensor: Tensor) -> Array:
    """The tensor's values as float32."""
    if tensor.kind == "BF16":
        return (tensor.bits.astype(np.uint32) << 16).view(np.float32)
    return tensor.bits.astype(np.float32)


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, memory-mapped. ValueError for types other than F32, F16 and BF16."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as source:
            header_size = int.from_bytes(source.read(8), "little")
            header = json.loads(source.read(header_size))
        data = np.memmap(file, mode="r", offset=8 + header_size)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            kind = entry["dtype"]
            if kind not in _NUMPY:
                raise ValueError(f"{file}: {name} is {kind}; only {', '.join(_NUMPY)} are written as GGUF")
            first, last = entry["data_offsets"]
            tensors[name] = Tensor(kind, data[first:last].view(_NUMPY[kind]).reshape(entry["shape"]))
    return tensors


def write_tensors(output: Path, values: dict[str, str | int | float], tensors: dict[str, Tensor]) -> None:
    """Write the file atomically."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)))
    for key, value in values.items():
        head += _string(key)
        if isinstance(value, str):
            head += struct.pack("<I", _STRING) + _string(value)
        elif isinstance(value, float):
            head += struct.pack("<If", _FLOAT32, value)
        else:
            head += struct.pack("<II", _UINT32, value)
    offset = 0
    for name, tensor in tensors.items():
        shape = tensor.bits.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", _TENSOR_TYPES[tensor.kind], offset)
        offset += _padded(tensor.bits.nbytes)
    temporary = output.with_name(output.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(head.ljust(_padded(len(head)), b"\0"))
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.bits).tobytes().ljust(_padded(tensor.bits.nbytes), b"\0"))
    os.replace(temporary, output)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
