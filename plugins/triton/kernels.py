"""What is compiled ahead of time to see that it compiles, and fits: launches as engines make them. Wants Triton.

A row is a launch itself, so that types, constants and warps are the launcher's, and stay so. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, native_specialize_impl
from trtspec_plugins.triton import accept, attention, compact, logits, sample
from trtspec_plugins.triton.compile import Kernel

VOCABULARY = 128256  # Llama 3's
ROWS, REQUESTS, K = 32, 8, 3
BLOCKS, BLOCK_SIZE = 1024, 16

_F32, _I32, _I64, _BOOL = torch.float32, torch.int32, torch.int64, torch.bool
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(dtype: str, head_dim: int, group: int) -> object:
    kind, heads = _DTYPES[dtype], 8
    rows, cache = _of(kind, ROWS, heads, head_dim), _of(kind, BLOCKS, BLOCK_SIZE, heads, head_dim)
    metadata = (_of(_I32, REQUESTS + 1), _of(_I32, REQUESTS), _of(_I32, REQUESTS, 64))
    queries = _of(kind, ROWS, heads * group, head_dim)
    return attention.spec_attention_(queries, rows, rows, cache, cache, *metadata, head_dim**-0.5)


def _logits() -> object:
    filters = (_of(_F32, ROWS), _of(_I32, ROWS), _of(_F32, ROWS), _of(_F32, ROWS))  # temperatures, top k, top p, min p
    bans = (_of(_I32, ROWS, 4), _of(_I64, ROWS, 4))
    return logits.process_logits(_of(_F32, ROWS, VOCABULARY), _of(_I64, ROWS), *bans, *filters)


def _sample(own_ids: bool) -> object:
    noise = (_of(_BOOL, ROWS), _of(_I64, ROWS), _of(_I64, ROWS))  # greedy, seeds, positions
    return sample.spec_sample(_of(_F32, ROWS, VOCABULARY), *noise, _of(_I64, VOCABULARY if own_ids else 0))


def _accept() -> object:
    metadata = (_of(_I32, REQUESTS), _of(_I32, REQUESTS), _of(_BOOL, REQUESTS))  # draft_lens, forced_accept, emits
    return accept.spec_accept(_of(_I64, REQUESTS, K + 1), _of(_I64, REQUESTS, K), *metadata)


def _compact(dtype: str, length: int) -> object:
    cache = _of(_DTYPES[dtype], BLOCKS, BLOCK_SIZE, 8, 128)
    metadata = (_of(_I32, REQUESTS, 64), _of(_I32, REQUESTS), _of(_I64, REQUESTS, length))
    return compact.kv_compact_(cache, cache, *metadata)


LAUNCHES: dict[str, Callable[[], object]] = {
    "spec_attention-bf16-d64-g8": lambda: _attention("bf16", 64, 8),
    "process_logits": _logits,
    "spec_sample": lambda: _sample(own_ids=False),
    "spec_sample-own-ids": lambda: _sample(own_ids=True),
    "spec_accept": _accept,
    "kv_compact-bf16-l4": lambda: _compact("bf16", 4),
    "kv_compact-bf16-l64": lambda: _compact("bf16", 64),
    "kv_compact-fp32-l8": lambda: _compact("fp32", 8),
}
"""Name -> a launch on tensors that have no memory."""


def kernels(name: str) -> list[Kernel]:
    """The kernels of a launch in LAUNCHES, specialised for its arguments as Triton does it; they are not run."""
    found: list[Kernel] = []

    def record(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = _specialised(function, args, kwargs)
        if kernel not in found:  # a launcher may launch one many times
            found.append(kernel)

    run = JITFunction.run
    JITFunction.run = record
    try:
        LAUNCHES[name]()
    finally:
        JITFunction.run = run
    return found


def _specialised(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kernel:
    options = {key: kwargs[key] for key in kwargs if key not in function.arg_names}
    bound = function.signature.bind(*args, **{key: kwargs[key] for key in kwargs if key not in options})
    bound.apply_defaults()
    backend = make_backend(GPUTarget("cuda", 90, 32))  # all of NVIDIA's specialise alike
    signature, constants, aligned = {}, {}, []
    for parameter, (name, value) in zip(function.params, bound.arguments.items(), strict=True):
        kind, key = "constexpr", None
        if not parameter.is_constexpr:
            wanted = (not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment)
            kind, key = native_specialize_impl(backend, value, parameter.is_const, *wanted)
        if kind == "constexpr":
            constants[name] = value
        else:
            signature[name] = kind
            aligned += [name] * (key == "D")
    num_warps = options.pop("num_warps", 4)
    return Kernel(function, signature, constants, num_warps, options, tuple(aligned))
