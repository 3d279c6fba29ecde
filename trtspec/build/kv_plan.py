"""Size of an engine's KV cache: as asked for, as its graphs require, or as the memory allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtspec.backends.compiled import CompiledStep
from trtspec.build.context import BuildContext
from trtspec.build.free_memory import free_memory
from trtspec.build.steps import build_steps
from trtspec.core import KVSpec
from trtspec.errors import CapacityError, ConfigError
from trtspec.models.weights import DTYPES


def plan_kv_blocks(context: BuildContext) -> int:
    """Number of KV blocks of the cache, scratch included. Graphs that take only one number decide it."""
    wanted, fixed = wanted_kv_blocks(context), fixed_kv_blocks(context)
    if fixed is None:
        return wanted or max(min(full_kv_blocks(context), free_memory() // 4 // bytes_per_block(context)), 2)
    if wanted is None or wanted == fixed or (context.config.kv_cache_memory is not None and wanted > fixed):
        return fixed
    needed = fixed * bytes_per_block(context)
    raise ConfigError(
        f"the engine was built with num_kv_blocks = {fixed}, which take {needed} bytes; {wanted} were asked for: "
        f"rebuild it with --num_kv_blocks {wanted}, or leave num_kv_blocks and kv_cache_memory unset"
    )


def wanted_kv_blocks(context: BuildContext, per_block: int | None = None) -> int | None:
    """Number of KV blocks that num_kv_blocks or kv_cache_memory asks for; None if neither is set.

    per_block: bytes_per_block, if the caller knows it already, as it reads the headers of all weights. CapacityError if
    the number is too small for any request.
    """
    config = context.config
    if config.kv_cache_memory is None:
        return config.num_kv_blocks
    per_block = bytes_per_block(context) if per_block is None else per_block
    blocks = config.kv_cache_memory // per_block
    if blocks < 2:
        raise CapacityError(
            f"kv_cache_memory = {config.kv_cache_memory} bytes is less than two KV blocks of {per_block}; raise it"
        )
    return blocks


def full_kv_blocks(context: BuildContext) -> int:
    """Number of KV blocks for max_batch_size full sequences, scratch included."""
    config, spec_plan = context.config, context.spec_plan
    branches = 0 if spec_plan is None or spec_plan.tree is None else spec_plan.num_extra_kv_tokens
    return config.max_batch_size * -(-(context.max_seq_len + branches) // config.block_size) + 1


def fixed_kv_blocks(context: BuildContext) -> int | None:
    """Number of KV blocks that the graphs of a built engine were compiled for; None if they take any number."""
    if context.built is None:
        return None
    executables = context.built.data["executables"].values()
    return next((CompiledStep.from_dict(one).kv_blocks for one in executables), None)


def bytes_per_block(context: BuildContext) -> int:
    """Bytes of K and V of one block in all layers of target and draft."""
    return context.config.block_size * kv_bytes_per_token(context)


def kv_bytes_per_token(context: BuildContext) -> int:
    """Bytes of K and V of one token in all layers of target and draft."""
    if context.built is not None:
        compiled = [CompiledStep.from_dict(one) for one in context.built.data["executables"].values()]
        return sum(_bytes_per_token(one.kv, DTYPES[one.dtype]) for one in compiled)
    steps = build_steps(context.described()).values()
    return sum(_bytes_per_token(step.kv_layers, step.like.dtype) for step in steps)


def _bytes_per_token(layers: Sequence[KVSpec], dtype: torch.dtype) -> int:
    return sum(layer.elements_per_token for layer in layers) * dtype.itemsize
