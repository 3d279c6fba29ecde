"""Launches as engines make them, compiled ahead of time to check that they compile and fit. Needs Triton.

Each entry is a launch itself, so that types, constants and warps always are the launcher's. No kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, native_specialize_impl
from trtspec_plugins.triton import accept, attention, compact, elementwise, embedding, linear, logits, norm, sample
from trtspec_plugins.triton.compile import Kernel

VOCABULARY = 128256  # Llama 3's
ROWS, REQUESTS, K = 32, 8, 3
BLOCKS, BLOCK_SIZE = 1024, 16

_F32, _I32, _I64, _BOOL = torch.float32, torch.int32, torch.int64, torch.bool
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(
    dtype: str,
    head_dim: int,
    group: int,
    rows: int = ROWS,
    columns: int = 64,
    all_options: bool = False,
    entries: int = 0,
) -> object:
    """Launch spec_attention_. all_options: with a tree mask, sinks, a window and a softcap. entries: of draft trees."""
    kind, heads = _DTYPES[dtype], 8
    fresh, cache = _of(kind, rows, heads, head_dim), _of(kind, BLOCKS, BLOCK_SIZE, heads, head_dim)
    metadata = (_of(_I32, REQUESTS + 1), _of(_I32, REQUESTS), _of(_I32, REQUESTS, columns))
    queries = _of(kind, rows, heads * group, head_dim)
    tree = _of(_I32, rows if all_options else 0, 1)
    sinks = _of(kind, heads * group if all_options else 0)
    settings = (head_dim**-0.5, 1024, 30.0) if all_options else (head_dim**-0.5,)
    trees = {"tree_base": _of(_I32, REQUESTS), "ancestors": _of(_I32, rows, entries)} if entries else {}
    return attention.spec_attention_(queries, fresh, fresh, cache, cache, *metadata, tree, sinks, *settings, **trees)


def _linear(dtype: str, layout: str, rows: int, inputs: int, outputs: int, float_out: bool = False) -> object:
    x, bias = _of(_DTYPES[dtype], rows, inputs), _of(_DTYPES[dtype], outputs)
    panels, none = outputs // 32, _of(_F32, 0)
    weight, scales, zeros = {
        "plain": (_of(_DTYPES[dtype], outputs, inputs), none, none),
        "int8": (_of(torch.int8, panels, inputs // 4, 32, 4), _of(_F32, panels, 32), none),
        "int8-groups": (
            _of(torch.int8, panels, inputs // 4, 32, 4),
            _of(torch.float16, panels, inputs // 32, 32),
            none,
        ),
        "int4": (
            _of(torch.uint8, panels, inputs // 8, 32, 4),
            _of(torch.float16, panels, inputs // 32, 32),
            _of(torch.uint8, panels, inputs // 32, 32),
        ),
        "fp8": (_of(torch.float8_e4m3fn, panels, inputs // 4, 32, 4), _of(_F32, panels, 32), none),
    }[layout]
    return linear.packed_linear(x, weight, scales, zeros, bias, none, outputs, float_out)


def _embedding(dtype: str) -> object:
    none = _of(_F32, 0)
    return embedding.packed_embedding(_of(_I64, ROWS), _of(_DTYPES[dtype], VOCABULARY, 4096), none, none, 4096)


def _rotate_heads(dtype: str) -> object:
    qkv, angles = _of(_DTYPES[dtype], ROWS, 48, 128), _of(_DTYPES[dtype], ROWS, 1, 128)
    return elementwise.rotate_heads(qkv[:, :32], qkv[:, 32:40], angles, angles)


def _logits(vocabulary: int = VOCABULARY, none: bool = False) -> object:
    """Launch process_logits. none: without filters, with temperatures alone."""
    R = 0 if none else ROWS
    unused = (_of(_I32, 0), _of(_I32, 0), _of(_F32, 0), _of(_I32, 0), _of(_F32, 0))  # history to bias_values
    bans = (_of(_I32, R, 4), _of(_I64, R, 4), _of(_I32, R, vocabulary // 32))  # ids, until, allow_mask
    filters = (_of(_F32, ROWS), _of(_I32, R), _of(_F32, R), _of(_F32, R))  # temperatures, top k, top p, min p
    return logits.process_logits(_of(_F32, ROWS, vocabulary), _of(_I64, ROWS), *unused, *bans, *filters)


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
    "spec_attention-bf16-d128-g4": lambda: _attention("bf16", 128, 4),
    "spec_attention-bf16-d128-g8": lambda: _attention("bf16", 128, 8),
    "spec_attention-bf16-d64-g4": lambda: _attention("bf16", 64, 4),
    "spec_attention-fp32-d128-g4": lambda: _attention("fp32", 128, 4),
    "spec_attention-bf16-d128-g4-prompt": lambda: _attention("bf16", 128, 4, rows=2048),
    "spec_attention-bf16-d128-g4-tree": lambda: _attention("bf16", 128, 4, columns=2048, all_options=True),
    "spec_attention-bf16-d128-g4-paths": lambda: _attention("bf16", 128, 4, columns=2048, entries=5),
    "packed_linear-bf16": lambda: _linear("bf16", "plain", 4, 4096, 6144),
    "packed_linear-bf16-batch": lambda: _linear("bf16", "plain", ROWS, 4096, 6144),
    "packed_linear-bf16-prompt": lambda: _linear("bf16", "plain", 2048, 4096, 6144),
    "packed_linear-bf16-vocabulary": lambda: _linear("bf16", "plain", ROWS, 4096, VOCABULARY, float_out=True),
    "packed_linear-bf16-short-prompt": lambda: _linear("bf16", "plain", 200, 4096, 6144),
    "packed_linear-int8": lambda: _linear("bf16", "int8", 4, 4096, 6144),
    "packed_linear-int8-prompt": lambda: _linear("bf16", "int8", 2048, 4096, 6144),
    "packed_linear-int8-groups": lambda: _linear("bf16", "int8-groups", 4, 4096, 6144),
    "packed_linear-int4": lambda: _linear("bf16", "int4", 4, 4096, 6144),
    "packed_linear-int4-prompt": lambda: _linear("bf16", "int4", 2048, 4096, 6144),
    "packed_linear-fp8-short-prompt": lambda: _linear("bf16", "fp8", 200, 4096, 6144),
    "packed_linear-fp8": lambda: _linear("bf16", "fp8", 4, 4096, 6144),
    "packed_linear-fp8-prompt": lambda: _linear("bf16", "fp8", 2048, 4096, 6144),
    "packed_linear-fp32-fp8": lambda: _linear("fp32", "fp8", 4, 4096, 6144),
    "packed_linear-fp32-fp8-prompt": lambda: _linear("fp32", "fp8", 2048, 4096, 6144),
    "packed_embedding-bf16": lambda: _embedding("bf16"),
    "silu_mul-bf16": lambda: elementwise.silu_mul(_of(torch.bfloat16, ROWS, 28672)),
    "rotate_heads-bf16": lambda: _rotate_heads("bf16"),
    "rotate_heads-fp32": lambda: _rotate_heads("fp32"),
    "rms_norm-bf16": lambda: norm.rms_norm(_of(torch.bfloat16, ROWS, 4096), _of(torch.bfloat16, 4096), 1e-5),
    "process_logits": _logits,
    "process_logits-few": lambda: _logits(4096),
    "process_logits-temperature": lambda: _logits(none=True),
    "spec_sample": lambda: _sample(own_ids=False),
    "spec_sample-own-ids": lambda: _sample(own_ids=True),
    "spec_accept": _accept,
    "kv_compact-bf16-l4": lambda: _compact("bf16", 4),
    "kv_compact-bf16-l64": lambda: _compact("bf16", 64),
    "kv_compact-fp32-l8": lambda: _compact("fp32", 8),
}
"""Name -> a launch on tensors that have no memory."""


def kernels(name: str) -> list[Kernel]:
    """Kernels of a launch in LAUNCHES, specialised for its arguments as Triton does it. They are not run."""
    found: list[Kernel] = []

    def record(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = _specialised(function, args, kwargs)
        if kernel not in found:  # a launcher may launch one kernel many times
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
    backend = make_backend(GPUTarget("cuda", 90, 32))  # all of NVIDIA's GPUs specialise alike
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
