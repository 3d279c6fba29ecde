"""Strict loading: every tensor of the checkpoint lands in exactly one place, and every place is filled.

`slots` says which rows of which parameter a checkpoint tensor is; `quantized` reads weights that are integers already.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trtspec.config.model import ModelConfig
from trtspec.config.quantized import CheckpointQuantization
from trtspec.errors import CheckpointError, UnsupportedError, WeightsError
from trtspec.models.decoder import Decoder
from trtspec.models.layers import allocate, unallocated
from trtspec.models.quantized import QuantizedLinears
from trtspec.models.slots import Slot, weight_slots
from trtspec.models.specs import decoder_spec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_MOST_MAPPED = 16 << 20  # bytes read of a file before it is opened anew, as they count as our memory until then


def load_decoder(
    config: ModelConfig, dtype: torch.dtype, role: str = "target", max_position: int | None = None
) -> Decoder:
    """The checkpoint folder `config.path` as a Decoder in eval mode, weights cast to `dtype`.

    `role` is what errors call this model; `max_position` (tokens) bounds the rotary table. Raises WeightsError,
    CheckpointError or UnsupportedError.
    """
    with unallocated(dtype):
        decoder = Decoder(decoder_spec(config), max_position)
    slots, tensors = weight_slots(decoder.spec), checkpoint_tensors(config.path, role)
    load_weights(decoder, slots, tensors, config.path, role, config.quantization)
    return decoder.eval().requires_grad_(False)


@torch.no_grad()
def load_weights(
    module: nn.Module,
    slots: Mapping[str, Slot],
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    role: str,
    quantization: CheckpointQuantization | None = None,
) -> None:
    """Fill `module`, `unallocated` or not, from the tensors; linears that are quantised among them come out packed.

    Beside what is loaded, memory is taken for one tensor, or one linear, at a time. WeightsError names tensors that are
    missing, unexpected or mis-shaped. For quantised weights that cannot be held as they are, see `QuantizedLinears`.
    """
    quantized = QuantizedLinears(slots, quantization, f"{role} weights in {folder}")
    parameters = dict(module.named_parameters())
    for slot in quantized.plain.values():
        allocate(parameters[slot.parameter])
    required = {name: slot.shape for name, slot in quantized.plain.items()} | quantized.required
    shapes = required | quantized.optional
    unseen, unexpected, misshaped = set(required), [], []
    for name, tensor in tensors:
        unseen.discard(name)
        shape = shapes.get(name)
        if shape is None:
            if not (_ignorable(name, slots) or quantized.ignorable(name, tensor)):
                unexpected.append(name)
        elif tuple(tensor.shape) != shape:
            misshaped.append(f"{name} is {tuple(tensor.shape)}, expected {shape}")
        elif name in quantized.plain:
            slot = slots[name]
            parameters[slot.parameter][slot.start : slot.start + slot.shape[0]].copy_(tensor)
        else:
            quantized.take(name, tensor, module)
    missing = [f"{name} {required[name]}" for name in sorted(unseen)]
    problems = [
        f"{kind}: {_few(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshaped))
        if names
    ]
    if problems:
        raise WeightsError(
            f"{role} weights in {folder} do not fit its config.json: {'; '.join(problems)}. "
            "Check that the weight files and config.json belong together"
        )
    quantized.finish(module)


def hf_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's weights under their Hugging Face names, fused matrices taken apart (contiguous copies)."""
    return tensors_of(decoder, weight_slots(decoder.spec))


@torch.no_grad()
def tensors_of(module: nn.Module, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
    """The module's weights by slot name, contiguous copies."""
    parameters = dict(module.named_parameters())
    return {
        name: parameters[slot.parameter][slot.start : slot.start + slot.shape[0]].detach().clone()
        for name, slot in slots.items()
    }


def weight_files(folder: Path, role: str) -> list[Path]:
    """The folder's safetensors files, shards in index order. Pickle files are refused: loading them runs their code."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{role} model: {index} is damaged ({error!r}); download it again") from error
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise CheckpointError(f"{role} model: {folder} lacks the shards {_few(missing)} that its index names")
        return [folder / shard for shard in shards]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
    if pickles:
        raise UnsupportedError(
            f"{role} model: {folder} holds only pickle weights ({_few(pickles)}), which can run code when loaded; "
            "convert them with transformers: model.save_pretrained(folder, safe_serialization=True); a draft head that "
            "it does not know: safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')"
        )
    raise CheckpointError(f"{role} model: no model.safetensors (or model.safetensors.index.json) in {folder}")


def weight_bytes(folder: Path, role: str) -> int:
    """Bytes of all weight files on disk."""
    return sum(file.stat().st_size for file in weight_files(folder, role))


def loaded_bytes(config: ModelConfig, role: str = "target") -> int:
    """Bytes of the weights in memory, in the checkpoint's dtype where they are not quantised, before any padding of
    floating-point panels. Raises UnsupportedError for quantised weights that `load_decoder` would refuse by shape."""
    slots = weight_slots(decoder_spec(config))
    where = f"{role} weights in {config.path}"
    return QuantizedLinears(slots, config.quantization, where).num_bytes(DTYPES[config.dtype].itemsize)


def checkpoint_tensors(folder: Path, role: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's safetensors files, in their order, read one at a time."""
    shard: Any  # safetensors does not say
    for file in weight_files(folder, role):
        try:
            shard, read = safe_open(file, framework="pt"), 0
            for name in shard.keys():  # noqa: SIM118  (not a dict)
                if read > _MOST_MAPPED:
                    shard, read = safe_open(file, framework="pt"), 0
                tensor = shard.get_tensor(name)
                read += tensor.nbytes
                yield name, tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{role} model: {file} is damaged or truncated ({error}); download or copy it again"
            ) from error


def _ignorable(name: str, slots: Mapping[str, Slot]) -> bool:
    """Tensors that carry nothing: rotary buffers of old exports, and a copy of the embedding as a tied head."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in slots)


def _few(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
