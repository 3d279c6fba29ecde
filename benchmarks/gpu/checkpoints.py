"""Llama-shaped checkpoints and EAGLE3 heads of random weights, which are generated on the device."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.peers import checkpoints as peers_checkpoints
from benchmarks.peers.checkpoints import Shape, layer_tensors, llama_config, llama_tensors, made, write_config
from trtspec.build.sources import digest

SHAPES = {
    "1B": Shape(hidden=2048, layers=16, intermediate=8192, heads=32, kv_heads=8, vocab=128256, tied=True),
    "8B": Shape(hidden=4096, layers=32, intermediate=14336, heads=32, kv_heads=8, vocab=128256, head_dim=128),
}
DRAFT_VOCAB = 32000
SHARD_BYTES = 2**31  # of each file of a checkpoint, unless a tensor is larger
ITEM_BYTES = 2  # of a bf16 number

Sizes = Mapping[str, tuple[int, ...]]


def checkpoint(name: str, work: Path, device: torch.device, report: Callable[[str], None]) -> Path:
    """Return the folder of the checkpoint of SHAPES[name] under `work`; write it unless it is there."""
    return _made(name, SHAPES[name], write_target, work, device, report)


def head(name: str, work: Path, device: torch.device, report: Callable[[str], None]) -> Path:
    """Return the folder of an EAGLE3 head for SHAPES[name] under `work`; write it unless it is there."""
    return _made(f"{name}-eagle3", SHAPES[name], write_head, work, device, report)


def _made(
    name: str,
    shape: Shape,
    write: Callable[[Shape, torch.device, Path], None],
    work: Path,
    device: torch.device,
    report: Callable[[str], None],
) -> Path:
    def fill(folder: Path) -> None:
        report(f"writing {work / name}")
        write(shape, device, folder)

    code = [Path(__file__), Path(peers_checkpoints.__file__)]
    made_of = digest([asdict(shape), str(torch.__version__)], code=code)
    return made(work / name, made_of, fill)


def write_target(shape: Shape, device: torch.device, folder: Path) -> None:
    """Write the target's checkpoint."""
    sizes = llama_tensors(shape)
    shards = split(sizes, SHARD_BYTES)
    weight_map: dict[str, str] = {}
    draw = partial(random_weight, generator=torch.Generator(device).manual_seed(0))
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: draw(sizes[name]).cpu() for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(map(num_bytes, sizes.values()))}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    write_config(llama_config(shape), folder)


def write_head(shape: Shape, device: torch.device, folder: Path) -> None:
    """Write a head of one layer of the model's shape, in the public layout.

    The head's ids are spread evenly over the model's. The head reads three captured states; the layers that they are
    captured from are left to the default.
    """
    H, draft_vocab = shape.hidden, min(DRAFT_VOCAB, shape.vocab)
    sizes = {
        "fc.weight": (H, 3 * H),
        **layer_tensors(shape, "midlayer", 2 * H),
        "midlayer.hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (draft_vocab, H),
    }
    generator = torch.Generator(device).manual_seed(1)
    tensors = {name: random_weight(size, generator).cpu() for name, size in sizes.items()}
    ids = torch.arange(draft_vocab) * shape.vocab // draft_vocab  # [Vd]
    tensors["d2t"] = ids - torch.arange(draft_vocab)
    tensors["t2d"] = torch.isin(torch.arange(shape.vocab), ids)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "target_hidden_size": H,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
    }
    write_config({**llama_config(shape), **own}, folder)


def random_weight(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A bf16 tensor of that size on the generator's device: ones for a norm, else normal numbers."""
    tensor = torch.ones(size, dtype=torch.bfloat16, device=generator.device)
    return tensor if len(size) == 1 else tensor.normal_(0.0, 0.02, generator=generator)


def split(sizes: Sizes, most: int) -> list[list[str]]:
    """Names in order, in groups of at most `most` bytes; a larger tensor has a group of its own."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or num_bytes(size) > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= num_bytes(size)
    return groups


def num_bytes(size: tuple[int, ...]) -> int:
    """Number of bytes of a tensor in bf16."""
    return ITEM_BYTES * math.prod(size)
