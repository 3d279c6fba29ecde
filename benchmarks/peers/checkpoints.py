"""The checkpoints and prompts of every contestant: the demo models, and Llama shapes of random weights.

Random weights make random text, in which the rounding of each engine leads to other tokens and drafts are never right.
So these models count: the lm_head's row of each token is the embedding of the token before it, in circles of CIRCLE
tokens. All layers run and add their noise, but the largest logit is far above the second. So every engine, in every
format, writes the same text, and prompt lookup finds the same drafts in it: none in the first circle, then all. Time
per step does not depend on the values of the weights.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.heads_vs_vllm import held_out_prompts
from trtspec.build.sources import digest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
CIRCLE = 32
_MADE_OF = "made_of.txt"  # in a checkpoint's folder


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama with bf16 weights. tied: whether embedding and lm_head are one matrix."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 64
    tied: bool = False


SHAPES = {
    "40M": Shape(hidden=512, layers=8, intermediate=1408, heads=8, kv_heads=4, vocab=16000),
    "246M": Shape(hidden=1024, layers=16, intermediate=2816, heads=16, kv_heads=4, vocab=32000),
}
MODELS = ("demo", *SHAPES)


@dataclass(frozen=True)
class Model:
    """A checkpoint to measure. draft, eagle3: folders of its drafts, or None."""

    name: str
    folder: Path
    draft: Path | None
    eagle3: Path | None

    @property
    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return config

    @property
    def tied(self) -> bool:
        """Whether lm_head is the embedding."""
        return bool(self.config["tie_word_embeddings"])

    @property
    def weight_bytes(self) -> int:
        """Least number of bytes that a step reads: all weights, but only a row of a separate embedding."""
        total = 0
        for file in self.folder.glob("*.safetensors"):
            with file.open("rb") as source:
                header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                total += 0 if name == "model.embed_tokens.weight" and not self.tied else last - first
        return total

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts: held-out code for the demo models, random ids for the others."""
        if self.name == "demo":
            return held_out_prompts(self.folder, count, length)
        generator = torch.Generator().manual_seed(length)
        ids: list[list[int]] = torch.randint(SHAPES[self.name].vocab, (count, length), generator=generator).tolist()
        return ids


def open_model(name: str, folder: Path) -> Model:
    """Open one of MODELS. Random weights are written into `folder` unless the same ones are there."""
    if name == "demo":
        return Model(name, DEMO / "target", DEMO / "draft", DEMO / "eagle3")
    shape = SHAPES[name]
    made_of = digest([asdict(shape), CIRCLE, *map(inspect.getsource, _MAKERS), str(torch.__version__)])
    return Model(name, made(folder / name, made_of, partial(write_checkpoint, shape)), None, None)


def made(folder: Path, made_of: str, write: Callable[[Path], object]) -> Path:
    """Return `folder`, and call `write` to fill it unless that was done before with the same `made_of`, a digest.

    `folder` is replaced only when everything is written; what was there before is deleted.
    """
    note = folder / _MADE_OF
    if note.is_file() and note.read_text(encoding="utf-8") == made_of:
        return folder
    staging = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    write(staging)
    (staging / _MADE_OF).write_text(made_of, encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)
    return folder


def write_checkpoint(shape: Shape, folder: Path, seed: int = 0) -> None:
    """Write a Llama that counts in circles; the module's docstring explains it."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    tensors = {
        name: torch.ones(size, dtype=torch.bfloat16) if len(size) == 1 else (0.02 * random(*size)).bfloat16()
        for name, size in llama_tensors(shape).items()
    }
    embedding = random(shape.vocab, shape.hidden).bfloat16()
    ids = torch.arange(shape.vocab)
    before = ids - ids % CIRCLE + (ids - 1) % CIRCLE
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = embedding[before] * shape.hidden**-0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(llama_config(shape), folder)


def llama_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name -> size of every tensor of a checkpoint."""
    H = shape.hidden
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, H)}
    for layer in range(shape.layers):
        sizes |= layer_tensors(shape, f"model.layers.{layer}", H)
    sizes["model.norm.weight"] = (H,)
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab, H)
    return sizes


def layer_tensors(shape: Shape, prefix: str, read: int) -> dict[str, tuple[int, ...]]:
    """Name -> size of a layer's tensors. read: input width of the attention."""
    H, queries, keys = shape.hidden, shape.head_dim * shape.heads, shape.head_dim * shape.kv_heads
    sizes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (H,),
        "post_attention_layernorm": (H,),
        "self_attn.q_proj": (queries, read),
        "self_attn.k_proj": (keys, read),
        "self_attn.v_proj": (keys, read),
        "self_attn.o_proj": (H, queries),
        "mlp.gate_proj": (shape.intermediate, H),
        "mlp.up_proj": (shape.intermediate, H),
        "mlp.down_proj": (H, shape.intermediate),
    }
    return {f"{prefix}.{name}.weight": size for name, size in sizes.items()}


def llama_config(shape: Shape) -> dict[str, Any]:
    """Contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def write_config(config: dict[str, Any], folder: Path) -> None:
    """Write config.json into a checkpoint's folder."""
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


_MAKERS = (write_checkpoint, llama_tensors, layer_tensors, llama_config)  # the code that decides what open_model writes
