"""Write the weights of an engine, and read them whole and fast into memory that kernels stream at full speed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from trtspec.errors import CapacityError, CheckpointError
from trtspec.kv.memory import huge_pages

_SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "BOOL": torch.bool,
}
_ALIGNMENT = 64  # bytes: a cache line, a vector register
_READ_AT_ONCE = 16 * 2**20  # bytes
_READERS = 4
_ELSEWHERE = "elsewhere"  # key in the metadata: name -> name of the same tensor in the other file, as JSON


def save_weight_file(tensors: Mapping[str, Tensor], file: Path, shared: Mapping[str, Tensor] | None = None) -> None:
    """Write tensors as a safetensors file.

    Safetensors refuses tensors that share memory, so these are written twice. It makes its file private, so the mode
    is set to 0644: another user may serve the engine. Tensors in `shared`, which another file holds, are only named.
    """
    seen: set[int] = set()
    apart, elsewhere = {}, {}
    names = {_place(tensor): name for name, tensor in (shared or {}).items() if tensor.numel()}
    for name, tensor in tensors.items():
        if (same := names.get(_place(tensor))) is not None:
            elsewhere[name] = same
            continue
        held = tensor.detach().cpu().contiguous()
        apart[name] = held.clone() if held.untyped_storage().data_ptr() in seen else held
        seen.add(held.untyped_storage().data_ptr())
    save_file(apart, file, {_ELSEWHERE: json.dumps(elsewhere)} if elsewhere else None)
    file.chmod(0o644)


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Key that is equal for two objects if they are the same tensor."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def load_weight_file(file: Path, shared: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return a safetensors file's tensors, in one arena of huge pages, and the tensors of `shared` that it names."""
    with file.open("rb", buffering=0) as source:
        header_size = int.from_bytes(source.read(8), "little")
        header, elsewhere = _entries(file, source.read(min(header_size, file.stat().st_size)))
        if missing := sorted(set(elsewhere.values()) - set(shared or {})):
            raise CheckpointError(f"{file} names {missing[0]}, which no other file of it has; rebuild the engine")
        size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        try:
            arena = huge_pages(max(size + _ALIGNMENT * len(header), 1))
        except OSError as error:
            raise CapacityError(
                f"{file} takes {size / 1e9:.1f} GB of memory, which the system does not give ({error.strerror})"
            ) from error
        tensors, parts, end = {}, [], 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            dtype = _SAFETENSORS_DTYPES[entry["dtype"]]
            count = (last - first) // dtype.itemsize
            flat = (
                torch.frombuffer(arena, dtype=dtype, count=count, offset=end) if count else torch.empty(0, dtype=dtype)
            )
            tensors[name] = flat.view(entry["shape"])
            for start in range(first, last, _READ_AT_ONCE):
                view = memoryview(arena)[end + start - first : end + min(start + _READ_AT_ONCE, last) - first]
                parts.append((name, 8 + header_size + start, view))
            end += -(-(last - first) // _ALIGNMENT) * _ALIGNMENT

        def read(part: tuple[str, int, memoryview]) -> None:
            name, offset, view = part
            while view:
                count = os.preadv(source.fileno(), [view], offset)
                if not count:
                    raise CheckpointError(f"{file} ends before the end of tensor {name}; rebuild the engine")
                view, offset = view[count:], offset + count

        with ThreadPoolExecutor(_READERS) as pool:  # most of the time goes into copies and zeroed pages
            list(pool.map(read, parts))
    return tensors | {name: (shared or {})[same] for name, same in elsewhere.items()}


def _entries(file: Path, text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the header says of the tensors, and the names of tensors that another file has.

    The first is name -> dtype, shape and data_offsets; the second is name -> name in the other file. CheckpointError
    if the header is damaged.
    """
    try:
        header = json.loads(text)
        named = json.loads(header.pop("__metadata__", {}).get(_ELSEWHERE, "{}"))
        elsewhere = {str(name): str(same) for name, same in named.items()}
        for entry in header.values():
            first, last = entry["data_offsets"]
            if last - first != math.prod(entry["shape"]) * _SAFETENSORS_DTYPES[entry["dtype"]].itemsize or first < 0:
                raise ValueError("sizes that do not agree")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has a damaged header ({error}); copy it again or rebuild the engine") from error
    return cast("dict[str, Any]", header), elsewhere
