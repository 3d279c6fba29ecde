"""The plan that `trtspec build --dry_run` shows: the engine that would be built, from config.json files alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtspec.backends.describe import Calls, GraphPlan, describe_graph, plugins
from trtspec.backends.tensorrt.profiles import Profile, TensorRTOptions, profiles
from trtspec.build.build import (
    described_steps,
    engine_backend,
    engine_options,
    largest_sizes,
    wanted_graphs,
    with_linear_cache,
)
from trtspec.build.context import BuildContext, Role, plan_context
from trtspec.build.memory import Activation, activations, table_bytes
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.methods.step import DecodeStep, Step
from trtspec.models.layers import weight_bytes
from trtspec.models.weights import missing_weights


@dataclass(frozen=True)
class KVPlan:
    """The KV layers of an executable. A block holds block_size tokens of all layers.

    layers: (kv heads, head size) of each layer. inputs, outputs: names of the caches, k and v of each layer in turn.
    Without outputs, graphs change their inputs in place.
    """

    layers: tuple[tuple[int, int], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtype: str
    block_size: int
    blocks: int  # as asked for, or enough for max_batch_size full sequences; scratch included
    bytes_per_token: int

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    @property
    def bytes(self) -> int:
        return self.blocks * self.bytes_per_block


@dataclass(frozen=True)
class ExecutablePlan:
    """One set of graphs over the same weights. Sizes are in bytes.

    weights: size in memory by model, where packed weights have the layouts of ops.packing. The models are the
    executable's own and, if a head drafts inside it, that head. weights_per_step: weights that one launch reads.
    tables: rotary positions, and the ids of a draft vocabulary. profiles: those of TensorRT for each K. plugins: those
    of TensorRT for the largest K.
    """

    graphs: tuple[GraphPlan, ...]
    kv: KVPlan
    weights: Mapping[str, int]
    weights_per_step: int
    tables: int
    activations: tuple[Activation, ...]
    profiles: Mapping[int, tuple[Profile, Profile]] = field(default_factory=dict)
    plugins: tuple[Calls, ...] = ()

    @property
    def calls(self) -> tuple[Calls, ...]:
        """Calls of trtspec's ops in the graph with the longest drafts."""
        return self.graphs[-1].calls


@dataclass(frozen=True)
class BuildPlan:
    """The plan of an engine build.

    draft_len: K. quantization: of target and draft. limits: as in EngineConfig, with max_seq_len resolved. missing: a
    line for each checkpoint that has no weights yet. options: those of TensorRT.
    """

    backend: str
    dtype: str
    mode: str
    draft_len: int
    quantization: tuple[str | None, str | None]
    limits: Mapping[str, int | None]
    missing: tuple[str, ...]
    executables: Mapping[str, ExecutablePlan]
    options: Mapping[str, Any] | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(made.kv.bytes_per_token for made in self.executables.values())

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose, and their total. A runtime takes more, for its code and for smaller activations."""
        made = self.executables.values()
        parts = {
            "weights": sum(sum(one.weights.values()) for one in made),
            "tables": sum(one.tables for one in made),
            "kv": sum(one.kv.bytes for one in made),
            "activations": sum(part.bytes for one in made for part in one.activations),
        }
        return {**parts, "total": sum(parts.values())}

    def to_dict(self) -> dict[str, Any]:
        """The fields and the values that follow from them, ready for JSON."""
        data = asdict(self)
        for role, made in self.executables.items():
            data["executables"][role]["kv"] |= {"bytes_per_block": made.kv.bytes_per_block, "bytes": made.kv.bytes}
        return {**data, "kv_bytes_per_token": self.kv_bytes_per_token, "memory": self.memory}


def plan_build(
    checkpoint: str | Path,
    speculative: SpeculativeConfig | None,
    config: EngineConfig,
    report: Callable[[str], None] = lambda what: None,
    options: TensorRTOptions | None = None,
) -> BuildPlan:
    """Return the plan of what build_engine would make.

    Folders need only their config.json. Weights that are present are checked by the headers of their files. Raises what
    build_engine would raise for configs and headers.
    """
    backend = engine_backend(config, options)
    if backend.profiles:
        options = engine_options(backend, options or TensorRTOptions())
    context = plan_context(checkpoint, speculative, config, backend).described()
    if options is not None and options.native:
        context = with_linear_cache(context)
    config = context.config
    checkpoints = {"target": context.target, "draft": context.draft}
    missing = [missing_weights(model.path, role) for role, model in checkpoints.items() if model is not None]
    limits = {name: getattr(config, name) for name in ("max_batch_size", "max_num_tokens", "max_input_len")}
    return BuildPlan(
        backend=backend.name,
        dtype=_name(context.dtype),
        mode=context.mode.name,
        draft_len=context.max_draft_len,
        quantization=context.quantizations,
        limits={**limits, "max_seq_len": context.max_seq_len, "block_size": config.block_size},
        missing=tuple(line for line in missing if line),
        executables={
            role: _executable(step, context, role, options) for role, step in described_steps(context, report).items()
        },
        options=asdict(options) if options is not None else None,
    )


def _executable(
    step: Step,
    context: BuildContext,
    role: Role,
    options: TensorRTOptions | None,
) -> ExecutablePlan:
    backend, sizes = context.backend, largest_sizes(context, role, options)
    constraints = backend.constraints and role == "target"
    graphs = tuple(
        describe_graph(
            step, sizes.at_draft_len(step, K), "uniform" if uniform else "ragged", K, backend.functional, constraints
        )
        for K, uniform in wanted_graphs(context, role, step)
    )
    dtype = step.like.dtype
    caches = tuple(f"{part}_cache_{layer}" for layer in range(len(step.kv_layers)) for part in "kv")
    whole = weight_bytes(step)
    own = weight_bytes(step.decoder) if isinstance(step, DecodeStep) else whole
    weights = {role: own, "head": whole - own} if whole > own else {role: own}
    return ExecutablePlan(
        graphs=graphs,
        kv=KVPlan(
            layers=tuple((heads, size) for heads, size, _ in step.kv_layers),
            inputs=caches,
            outputs=tuple(f"new_{name}" for name in caches) if backend.functional else (),
            dtype=_name(dtype),
            block_size=sizes.block_size,
            blocks=sizes.blocks - sizes.linear,  # a linear cache has no scratch
            bytes_per_token=sum(layer.elements_per_token for layer in step.kv_layers) * dtype.itemsize,
        ),
        weights=weights,
        weights_per_step=step.weight_bytes_per_step,
        tables=table_bytes(step),
        activations=activations(step, sizes),
        profiles={
            graph.draft_len: profiles(
                [tensor.name for tensor in graph.inputs],
                step.kv_layers,
                sizes.at_draft_len(step, graph.draft_len),
                None if options is None else options.opt_num_tokens,
                step.hidden_width,
                step.vocab_size,
            )
            for graph in graphs
            if backend.profiles
        },
        plugins=plugins(graphs[-1].calls, sizes.linear) if backend.profiles and backend.plugins else (),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
