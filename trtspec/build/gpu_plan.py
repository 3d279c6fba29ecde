"""Whether a model fits a GPU, and how large its KV cache can be there, computed before anything is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from trtspec.backends.cuda.executable import has_uniform_graphs
from trtspec.backends.sizes import Sizes
from trtspec.build.context import BuildContext, Role
from trtspec.build.kv_plan import bytes_per_block, full_kv_blocks, wanted_kv_blocks
from trtspec.build.memory import activations, silu_bytes, table_bytes
from trtspec.build.steps import build_steps
from trtspec.errors import CapacityError, UnsupportedError
from trtspec.methods.drafter import CHAIN_ROWS
from trtspec.methods.step import Step
from trtspec.models.layers import weight_bytes

_ALIVE = 2  # an op's inputs and outputs are in memory at the same time
_MARGIN = 0.05  # share of the free memory, for kernels, libraries and what the allocator cannot use


def plan_gpu_blocks(context: BuildContext, free: int) -> int:
    """Number of KV blocks of the cache, scratch included.

    It is the number asked for, or else enough for max_batch_size full sequences, as far as `free` bytes allow.
    CapacityError if the memory is too small; it names what would fit.
    """
    parts = gpu_memory(context, free)
    per_block = bytes_per_block(context)
    wanted = wanted_kv_blocks(context, per_block)
    left, least = free - sum(parts.values()), _least_blocks(context) * per_block
    if left < least:
        needed = {**parts, "KV cache, at least": least}
        raise CapacityError(
            f"{context.target.path} needs {_gb(sum(needed.values()))} of the GPU's memory "
            f"({', '.join(f'{name} {_gb(size)}' for name, size in needed.items())}), and {_gb(free)} are free; "
            f"{_remedy(context, free, per_block)}"
        )
    fitting = left // per_block
    if wanted is not None and wanted > fitting:
        raise CapacityError(
            f"{wanted} KV blocks of {context.config.block_size} tokens take {_gb(wanted * per_block)} of the GPU's "
            f"memory, and {_gb(left)} are left next to the model's; num_kv_blocks = {fitting} fit, which hold "
            f"{(fitting - 1) * context.config.block_size} tokens"
        )
    return wanted or min(full_kv_blocks(context), fitting)


def gpu_memory(context: BuildContext, free: int) -> dict[str, int]:
    """Bytes of everything but the KV cache, by purpose, from the headers of the weight files."""
    described, config = build_steps(context.described()), context.config
    K = context.max_total_draft_tokens
    # (K, rows of a request in a graph): a draft model draws one token
    shapes: dict[Role, tuple[int, int]] = {"target": (K, K + 1), "draft": (0, CHAIN_ROWS)}
    launch: Any = importlib.import_module("trtspec_plugins.triton.launch")  # does not need Triton
    parts = dict.fromkeys(("weights", "tables", "activations", "CUDA graphs", "attention scratch"), 0)
    parts["weights"] = weight_bytes(*described.values())  # a head may share some of the target's
    for role, step in described.items():
        draft_len, width = shapes[role]
        sizes = Sizes.of(config, context.max_seq_len, draft_len, 0)
        in_graphs = replace(sizes, rows=config.max_batch_size * width)
        parts["tables"] += table_bytes(step)
        parts["activations"] += _launch_bytes(step, sizes)
        longest = context.max_seq_len + sizes.rows
        scratch = max((launch.most_scratch(longest, layer.head_dim) for layer in step.kv_layers), default=0)
        parts["attention scratch"] += scratch
        # CUDA graphs share a memory of their own, as large as the largest batch needs
        if context.of(role).cuda_graphs and has_uniform_graphs(step):
            parts["CUDA graphs"] += _launch_bytes(step, in_graphs)
            if role == "target":  # next to it, the logits for the host
                parts["CUDA graphs"] += in_graphs.rows * step.vocab_size * 4
            parts["attention scratch"] += scratch
    return {**parts, "margin": int(_MARGIN * free)}


def _launch_bytes(step: Step, sizes: Sizes) -> int:
    """Bytes that a launch of these sizes takes for a while."""
    return _ALIVE * sum(part.bytes for part in activations(step, sizes)) + silu_bytes(step, sizes.rows)


def _least_blocks(context: BuildContext) -> int:
    """Number of KV blocks without which the engine cannot start, scratch included.

    If the user sets the cache's size, one request needs a block; otherwise each of max_batch_size requests does.
    """
    asked = context.config.num_kv_blocks is not None or context.config.kv_cache_memory is not None
    return 2 if asked else context.config.max_batch_size + 1


def _remedy(context: BuildContext, free: int, per_block: int) -> str:
    found = list(_fitting(context, free, per_block))
    if not found:
        return "no smaller setting of this model fits, either: take a GPU with more memory"
    return f"these would fit: {', '.join(found)}"


def _fitting(context: BuildContext, free: int, per_block: int) -> Iterator[str]:
    """Changes of one setting each with which the model fits. The weights of a built engine cannot change."""
    config = context.config
    quantized = any(kind is not None for kind in context.quantizations) or context.target.quantization is not None
    candidates: list[list[Mapping[str, Any]]] = [
        [] if quantized or context.built is not None else [{"quantization": kind} for kind in ("int8", "int4")],
        [{"max_num_tokens": rows} for rows in _halves(config.max_num_tokens, _least_rows(context))],
        [{"max_batch_size": size} for size in _halves(config.max_batch_size, 1)],
    ]
    for group in candidates:
        for change in group:
            smaller = replace(context, config=replace(config, **change))
            try:
                parts = gpu_memory(smaller, free)
            except UnsupportedError:  # these weights cannot be quantised in this way
                continue
            if free - sum(parts.values()) >= _least_blocks(smaller) * per_block:
                ((name, value),) = change.items()
                yield f"{name} = {value!r}"
                break


def _least_rows(context: BuildContext) -> int:
    return context.config.max_batch_size * (context.max_total_draft_tokens + 1)


def _halves(value: int, least: int) -> list[int]:
    """value / 2, value / 4, ... down to `least`."""
    found = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return found


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
