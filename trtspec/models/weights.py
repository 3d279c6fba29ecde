"""Strict loading: every tensor of the checkpoint goes to exactly one place, and every place is filled.

slots.py says which rows of which parameter a checkpoint tensor becomes. quantized.py reads weights that are quantised
already.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.errors import CheckpointError, UnsupportedError, WeightsError
from trtspec.gguf import SUFFIX
from trtspec.gguf.folder import WEIGHTS
from trtspec.gguf.shard import GgufShard
from trtspec.models.decoder import Decoder
from trtspec.models.layers import allocate, unallocated
from trtspec.models.quantized import QuantizedLinears
from trtspec.models.slots import Slot, weight_slots
from trtspec.models.specs import ARCHITECTURES, decoder_spec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_T = TypeVar("_T")
_EAGLE_FC = {"fc.weight", "model.fc.weight"}
_FLOATS = ("F64", "F32", "F16", "BF16")  # names that safetensors uses
_MOST_MAPPED = 16 << 20  # bytes read of a file before it is reopened; until then they count as our memory


def load_decoder(
    config: ModelConfig, dtype: torch.dtype, role: str = "target", max_position: int | None = None
) -> Decoder:
    """Load the checkpoint folder `config.path` as a Decoder in eval mode, with weights cast to `dtype`.

    role: name of this model in error messages.
    max_position: tokens that bound the rotary table.
    Raises WeightsError, CheckpointError or UnsupportedError.
    """
    with unallocated(dtype):
        decoder = Decoder(decoder_spec(config), max_position)
    packed = config.quantization is not None
    slots, tensors = weight_slots(decoder.spec), checkpoint_tensors(config.path, role, of_decoder(config), packed)
    load_weights(decoder, slots, tensors, config.path, role, config.quantization)
    return decoder.eval().requires_grad_(False)


def describe_decoder(
    config: ModelConfig, dtype: torch.dtype, role: str = "target", max_position: int | None = None
) -> Decoder:
    """Return the Decoder of `load_decoder` without values: it is on torch's meta device and takes no memory.

    The folder needs only its config.json. If there are weights, the files' headers are read to check their names and
    shapes. Linears that the checkpoint quantised are packed. A linear whose inputs may be sorted counts as sorted.
    """
    with torch.device("meta"), unallocated(dtype):
        decoder = Decoder(decoder_spec(config), max_position)
    slots = weight_slots(decoder.spec)
    if not missing_weights(config.path, role):
        shapes = checkpoint_shapes(config.path, role, of_decoder(config), config.quantization is not None)
        check_shapes(slots, shapes, config.path, role, config.quantization)
    QuantizedLinears(slots, config.quantization, f"{role} weights in {config.path}").describe(decoder)
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
    """Fill `module`, `unallocated` or not, from the tensors. Quantised linears are packed.

    Apart from what is loaded, it takes memory for one tensor, or one linear, at a time. WeightsError names tensors that
    are missing, unexpected or mis-shaped. `QuantizedLinears` raises the errors for quantised weights that cannot be
    held as they are.
    """
    quantized = QuantizedLinears(slots, quantization, f"{role} weights in {folder}")
    parameters = dict(module.named_parameters())
    for slot in quantized.plain.values():
        allocate(parameters[slot.parameter])
    expected = _Expected(slots, quantized)
    for name, tensor in tensors:
        if not expected.fits(name, tuple(tensor.shape)):
            if expected.is_unknown(name) and not quantized.ignorable(name, tensor):
                expected.unexpected.append(name)
        elif name in quantized.plain:
            slot = slots[name]
            parameters[slot.parameter][slot.start : slot.start + slot.shape[0]].copy_(tensor)
        else:
            quantized.take(name, tensor, module)
    expected.check(folder, role)
    quantized.finish(module)


def check_shapes(
    slots: Mapping[str, Slot],
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    folder: Path,
    role: str,
    quantization: CheckpointQuantization | None = None,
) -> None:
    """Raise the WeightsError that `load_weights` raises for tensors of these names and shapes, without values."""
    quantized = QuantizedLinears(slots, quantization, f"{role} weights in {folder}")
    expected = _Expected(slots, quantized)
    for name, shape in shapes:
        if not expected.fits(name, shape) and expected.is_unknown(name) and not quantized.is_spare(name):
            expected.unexpected.append(name)
    expected.check(folder, role)


class _Expected:
    """A record of the tensors that must be there, and of the errors in those that arrived."""

    def __init__(self, slots: Mapping[str, Slot], quantized: QuantizedLinears) -> None:
        self.slots = slots
        self.required = {name: slot.shape for name, slot in quantized.plain.items()} | quantized.required
        self.shapes = self.required | quantized.optional
        self.unseen = set(self.required)
        self.unexpected: list[str] = []
        self.misshaped: list[str] = []

    def fits(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is one of the expected ones, in its right shape."""
        self.unseen.discard(name)
        expected = self.shapes.get(name, shape)
        if not shape and expected == (1,):
            shape = expected  # one number, which writers store with different shapes
        if shape != expected:
            self.misshaped.append(f"{name} is {shape}, expected {expected}")
        return name in self.shapes and shape == expected

    def is_unknown(self, name: str) -> bool:
        return name not in self.shapes and not _ignorable(name, self.slots)

    def check(self, folder: Path, role: str) -> None:
        """Raise WeightsError unless all expected tensors arrived, and no others."""
        missing = [f"{name} {self.required[name]}" for name in sorted(self.unseen)]
        problems = [
            f"{kind}: {_few(names)}"
            for kind, names in (("missing", missing), ("unexpected", self.unexpected), ("wrong shape", self.misshaped))
            if names
        ]
        if problems:
            raise WeightsError(
                f"{role} weights in {folder} do not fit its config.json: {'; '.join(problems)}. {self._remedy()}"
            )

    def _remedy(self) -> str:
        """Advice that ends the error message.

        Many an EAGLE head calls itself a plain decoder. Only its fc, quantised or not, distinguishes them.
        """
        wanted, found = (
            any(name.removeprefix("model.").startswith("fc.") for name in names)
            for names in (self.required, self.unexpected)
        )
        if _EAGLE_FC & set(self.unexpected) and not wanted:
            return "fc.weight is an EAGLE head's: give the folder as model in speculative_config, with method='eagle'"
        if _EAGLE_FC & self.unseen and not found:
            return "Without fc.weight it is no EAGLE head; if it is a whole model, set method='draft_model'"
        return "Check that the weight files and config.json belong together"


def hf_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Contiguous copies of the decoder's weights under their Hugging Face names, with fused matrices split."""
    return tensors_of(decoder, weight_slots(decoder.spec))


@torch.no_grad()
def tensors_of(module: nn.Module, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
    """The module's weights by slot name, as contiguous copies."""
    parameters = dict(module.named_parameters())
    return {
        name: parameters[slot.parameter][slot.start : slot.start + slot.shape[0]].detach().clone()
        for name, slot in slots.items()
    }


def weight_files(folder: Path, role: str) -> list[Path]:
    """The folder's safetensors files, shards in index order, or its GGUF file.

    Pickle files are refused with UnsupportedError: loading them runs their code.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{role} model: {index} is damaged ({error!r}); download it again") from error
        if strangers := [shard for shard in shards if not shard.endswith(".safetensors") or "/" in shard]:
            raise CheckpointError(f"{role} model: {index} names {_few(strangers)}, no files of {folder}; do not use it")
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise CheckpointError(f"{role} model: {folder} lacks the shards {_few(missing)} that its index names")
        return [folder / shard for shard in shards]
    for name in ("model.safetensors", WEIGHTS):
        if (folder / name).is_file():
            return [folder / name]
    pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
    if pickles:
        raise UnsupportedError(
            f"{role} model: {folder} holds only pickle weights ({_few(pickles)}), which can run code when loaded; "
            "convert them with transformers: model.save_pretrained(folder, safe_serialization=True); a draft head that "
            "it does not know: safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')"
        )
    raise CheckpointError(f"{role} model: no model.safetensors (or model.safetensors.index.json) in {folder}")


def _open(file: Path, role: str, packed: bool = False) -> Any:
    """Open a safetensors file, or a GGUF file that is read like one."""
    return GgufShard.open(file, role, packed) if file.suffix == SUFFIX else safe_open(file, framework="pt")


def missing_weights(folder: Path, role: str) -> str | None:
    """One-line reason why there are no weights to load; None if there are. UnsupportedError for pickle files."""
    try:
        weight_files(folder, role)
    except CheckpointError as error:
        return str(error)
    return None


def checkpoint_bytes(folder: Path, role: str) -> int:
    """Bytes of all weight files on disk."""
    return sum(file.stat().st_size for file in weight_files(folder, role))


def loaded_bytes(config: ModelConfig, role: str = "target") -> int:
    """Bytes of the weights in memory, before any padding of floating-point panels.

    Weights that are not quantised count in the checkpoint's dtype. Raises UnsupportedError for quantised weights that
    `load_decoder` would refuse by shape.
    """
    slots = weight_slots(decoder_spec(config))
    where = f"{role} weights in {config.path}"
    return QuantizedLinears(slots, config.quantization, where).num_bytes(DTYPES[config.dtype].itemsize)


Wanted = Callable[[str], bool]
"""A filter of tensors to read, by name."""


def checkpoint_tensors(
    folder: Path, role: str, wanted: Wanted = lambda name: True, packed: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield every wanted tensor of the folder's weight files, in their order, read one at a time.

    packed: some tensors hold quantised weights. If False, such a tensor is a WeightsError.
    """
    shard: Any  # safetensors does not declare its type
    for file in weight_files(folder, role):
        try:
            shard, read = _open(file, role, packed), 0
            for name in filter(wanted, shard.keys()):
                if read > _MOST_MAPPED:
                    shard, read = _open(file, role, packed), 0
                _check_dtype(shard, name, packed, folder, role)
                tensor = shard.get_tensor(name)
                read += tensor.nbytes
                yield name, tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{role} model: {file} is damaged or truncated ({error}); download or copy it again"
            ) from error


def checkpoint_shapes(
    folder: Path, role: str, wanted: Wanted = lambda name: True, packed: bool = False
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor that `checkpoint_tensors` yields, from the files' headers."""
    shard: Any
    for file in weight_files(folder, role):
        try:
            shard = _open(file, role, packed)
            for name in filter(wanted, shard.keys()):
                _check_dtype(shard, name, packed, folder, role)
                yield name, tuple(shard.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{role} model: {file} is damaged or truncated ({error}); download or copy it again"
            ) from error


def _check_dtype(shard: Any, name: str, packed: bool, folder: Path, role: str) -> None:
    """Raise WeightsError for weights that are not floats unless `packed`: they would be used without their scales."""
    dtype = shard.get_slice(name).get_dtype()
    if not packed and dtype not in _FLOATS and name.endswith((".weight", ".bias")):
        raise WeightsError(
            f"{role} weights in {folder}: {name} is stored as {dtype}, and config.json says nothing of quantised "
            f"weights (quantization_config); use a checkpoint in {', '.join(_FLOATS)}, or its own config.json"
        )


def renamed(
    found: Iterable[tuple[str, _T]], public_name: Callable[[str], str], folder: Path, role: str
) -> Iterator[tuple[str, _T]]:
    """Yield tensors, or other values for each, under the names that `public_name` returns for the checkpoint's.

    WeightsError if two names become the same.
    """
    seen = set()
    for name, tensor in found:
        public = public_name(name)
        if public in seen:
            raise WeightsError(
                f"{role} weights in {folder}: {public} is there twice, once as {name}; keep the one that is right"
            )
        seen.add(public)
        yield public, tensor


def same_tensor(one: tuple[Path, str, str], other: tuple[Path, str, str], dtype: torch.dtype) -> bool:
    """Whether (folder, tensor, role) and another one have equal values in `dtype`. False if either does not exist."""
    pairs = itertools.zip_longest(_row_groups(*one), _row_groups(*other))
    equal = (a is not None and b is not None and torch.equal(a.to(dtype), b.to(dtype)) for a, b in pairs)
    first = next(equal, False)
    return first and all(equal)


def _row_groups(folder: Path, wanted: str, role: str, rows: int = 1024) -> Iterator[Tensor]:
    """Yield the rows of a tensor, `rows` at a time; nothing if the folder has no such tensor."""
    shard: Any
    for file in weight_files(folder, role):
        shard = _open(file, role)
        if wanted in shard.keys():  # noqa: SIM118  (not a dict)
            for start in range(0, shard.get_slice(wanted).get_shape()[0], rows):
                shard = _open(file, role)  # reopened: bytes read until now no longer count as our memory
                yield shard.get_slice(wanted)[start : start + rows]


def of_decoder(config: ModelConfig) -> Wanted:
    """Filter for all tensors but those of MTP layers, which the architecture's checkpoints may hold as well."""
    prefix = ARCHITECTURES[config.architecture].mtp_prefix
    return lambda name: prefix is None or not name.startswith(prefix)


def _ignorable(name: str, slots: Mapping[str, Slot]) -> bool:
    """Whether the tensor carries nothing: a rotary buffer of an old export, or a tied head's copy of the embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in slots)


def _few(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
