"""Build TensorRT engines of a step: `rank0.engine`, and `rank0_k<K>.engine` for further draft lengths.

One network takes every batch of a K. Its second optimisation profile is for batches of generations alone (profiles.py).
Weights are inside the engines. For stripped engines they are in one file next to the engines. Networks of TensorRT 11
are always strongly typed: each layer computes in the dtype that the step has there.

Tests without a GPU show three things. The calls fit the signatures of TensorRT 11.4's Python bindings. The network
computes what the step does, if each layer works as documented. The bindings' own plugin registry makes the plugins.

The tests do not show that TensorRT 11's builder takes the network and the chain of aliased caches in it. They show
neither the time of a build nor the cost of running an engine. Nor do they show whether a row's result is the same in
batches of different sizes, for which TensorRT may pick different kernels.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from trtspec.backends.compiled import WEIGHTS, CompiledStep, Graph
from trtspec.backends.export import example_for, example_kv
from trtspec.backends.graph_io import SLOT_ROWS
from trtspec.backends.onnx.export import DOMAIN, export_onnx, given_inputs
from trtspec.backends.onnx.linear import write_linears
from trtspec.backends.sizes import Sizes
from trtspec.backends.tensorrt.cuda import Cuda
from trtspec.backends.tensorrt.executable import load_tensorrt, made_for, open_cuda
from trtspec.backends.tensorrt.inline import inline_ops
from trtspec.backends.tensorrt.network import Attributes, PluginOf, write_network
from trtspec.backends.tensorrt.profiles import Profile, TensorRTOptions, profiles
from trtspec.backends.weight_file import save_weight_file
from trtspec.errors import ConfigError, DependencyError, EngineError
from trtspec.methods.step import Step

_BITS = {ir.DataType.FLOAT: "fp32", ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}


def require() -> None:
    """Raise DependencyError if TensorRT, its driver or a GPU is missing, or too old."""
    load_tensorrt()
    open_cuda()


def registered_plugins(trt: Any) -> PluginOf:
    """Return a function that makes our plugins, in their AOT form, through TensorRT's plugin registry."""
    from trtspec_plugins.tensorrt import register
    from trtspec_plugins.tensorrt.signatures import PLUGINS, plugin_of

    register()
    registry = trt.get_plugin_registry()

    def make(op: str, present: Collection[str], attributes: Attributes, chained: bool) -> tuple[Any, tuple[str, ...]]:
        name = plugin_of(op, present, chained)
        creator = registry.get_creator(name, "1", "trtspec")
        fields = [_field(trt, one, attributes[one]) for one in PLUGINS[name].attributes]  # must live until copied
        prefers = trt.QuickPluginCreationRequest.PREFER_AOT
        collection = trt.PluginFieldCollection(fields)
        plugin = creator.create_plugin(name, "trtspec", collection, trt.TensorRTPhase.BUILD, prefers)
        if plugin is None:
            raise EngineError(f"TensorRT made no plugin trtspec::{name}; its log says why. Please report this")
        return plugin, PLUGINS[name].inputs

    return make


def no_plugin(op: str, present: Collection[str], attributes: Attributes, chained: bool) -> Any:
    """Raise LookupError: a network of TensorRT's own layers has no plugins."""
    raise LookupError(f"{op} has no layers of TensorRT's own; please report this")


def _field(trt: Any, name: str, value: float) -> Any:
    import numpy as np

    if isinstance(value, int):
        return trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32)
    return trt.PluginField(name, np.array([value], np.float32), trt.PluginFieldType.FLOAT32)


def check_kernels(model: ir.Model, native: bool = False) -> None:
    """Raise DependencyError, with the command that compiles it, if a plugin's kernel is missing for this GPU."""
    from trtspec_plugins.tensorrt.build import compiled_for
    from trtspec_plugins.tensorrt.device import architecture

    try:
        for name in sorted(aot_kernels(model, native)):
            compiled_for(name, architecture())
    except (LookupError, RuntimeError) as error:
        raise DependencyError(f"TensorRT plugins: {error.args[0]}") from error


def aot_kernels(model: ir.Model, native: bool = False) -> set[str]:
    """Names, as in build_scripts/build_plugins.py, of the kernels that a network of this graph calls.

    native: attention is TensorRT's own.
    """
    from trtspec_plugins.tensorrt.signatures import plugin_of

    found = set()
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type == "SpecAttention":
            if native:
                continue
            q, k = node.inputs[0], node.inputs[1]
            assert q is not None
            assert k is not None
            heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[2]
            found.add(f"SpecAttention-{_BITS[q.dtype]}-d{width}-g{heads // kv_heads}")
        elif node.domain == DOMAIN and node.op_type == "PackedLinear":
            x = node.inputs[0]
            assert x is not None
            found.add(f"{plugin_of(node.op_type, given_inputs(node))}-{_BITS[x.dtype]}")
        elif node.domain == DOMAIN and node.op_type == "QuantizeGroups":
            x = node.inputs[0]
            assert x is not None
            found.add(f"QuantizeGroups-{_BITS[x.dtype]}-g{node.attributes['group'].as_int()}")
        elif node.domain == DOMAIN and node.op_type == "GroupsLinear":
            x, scales = node.inputs[0], node.inputs[5]
            assert x is not None
            assert scales is not None
            group = x.shape[-1] // scales.shape[1]
            found.add(f"GroupsLinear-{_BITS[x.dtype]}-w{node.attributes['bits'].as_int()}-g{group}")
        elif node.domain == DOMAIN and node.op_type in ("ProcessLogits", "SpecSample", "SpecAccept"):
            found.add(plugin_of(node.op_type, given_inputs(node)))
    return found


def build_plan(
    trt: Any,
    model: ir.Model,
    shapes: Sequence[Profile],
    options: TensorRTOptions,
    plugin_of: PluginOf,
    linear: tuple[int, int] | None = None,
) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return the plan of an engine, which is the content of its file, and the weights for a refit, by name.

    `shapes` may name inputs that the graph does not read. linear: same meaning as in write_network. EngineError if
    TensorRT does not build the plan, ConfigError for a timing cache of another TensorRT or GPU.
    """
    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    network = builder.create_network(_network_flags(trt))
    written = write_network(trt, network, model, plugin_of, linear)
    if options.refit or options.strip_plan:
        for name in written.weights:
            network.mark_weights_refittable(name)  # not sizes and indices, which TensorRT must know at build time
    config = builder.create_builder_config()
    _set_flags(trt, config, options)
    inputs = [network.get_input(i).name for i in range(network.num_inputs)]
    for profile in shapes:
        made = builder.create_optimization_profile()
        for name in inputs:
            made.set_shape(name, *profile.shapes[name])
        if config.add_optimization_profile(made) < 0:
            raise EngineError(f"TensorRT refused the profile {profile.name}; its log says why. Please report this")
    _read_timing_cache(config, options)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError("TensorRT did not build the engine; its log says why")
    if options.output_timing_cache is not None:
        _write(Path(options.output_timing_cache), bytes(config.get_timing_cache().serialize()))
    return bytes(plan), written.weights  # memory of the other constants is not needed any more


def _network_flags(trt: Any) -> int:
    """Flags of a network: strongly typed (TensorRT 11 knows no other), and with plugins in their AOT form."""
    flags = trt.NetworkDefinitionCreationFlag
    known = (getattr(flags, name, None) for name in ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS"))
    return sum(1 << int(flag) for flag in known if flag is not None)


def _set_flags(trt: Any, config: Any, options: TensorRTOptions) -> None:
    flag = trt.BuilderFlag
    config.clear_flag(flag.TF32)  # TF32 would round the factors of fp32 products to 10 bits
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)  # caches are changed in place
    for wanted, one in (
        (options.weight_streaming, flag.WEIGHT_STREAMING),
        (options.refit or options.strip_plan, flag.REFIT_INDIVIDUAL),
        (options.strip_plan, flag.STRIP_PLAN),
        (options.version_compatible, flag.VERSION_COMPATIBLE),
    ):
        if wanted:
            config.set_flag(one)
    if options.sm:  # TensorRT-RTX, which has no level of compatibility
        config.num_compute_capabilities = len(options.sm)
        for place, one in enumerate(options.sm):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{one}"), place)
        return
    level = getattr(trt.HardwareCompatibilityLevel, options.hardware_compatibility.upper())
    config.hardware_compatibility_level = level


def _read_timing_cache(config: Any, options: TensorRTOptions) -> None:
    held = b""
    if options.input_timing_cache is not None:
        try:
            held = Path(options.input_timing_cache).read_bytes()
        except OSError as error:
            raise ConfigError(f"input_timing_cache: {error}; leave it away for the first build") from error
    if not config.set_timing_cache(config.create_timing_cache(held), False):
        raise ConfigError(
            f"input_timing_cache = {options.input_timing_cache!r} is of another TensorRT or GPU; leave it away"
        )


def _write(path: Path, data: bytes) -> None:
    """Write a file by renaming a complete one, so that a reader never sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)  # temporary files are private
    os.replace(file.name, path)


def compile_step(
    step: Step,
    block_size: int,
    wanted: Sequence[tuple[int, bool]],
    folder: Path,
    report: Callable[[str], None] = lambda what: None,
    constraints: bool = False,
    *,
    sizes: Sizes,
    options: TensorRTOptions | None = None,
    trt: Any = None,
    cuda: Cuda | None = None,
    plugin_of: PluginOf | None = None,
    own_layers: Mapping[str, str] | None = None,
) -> CompiledStep:
    """Build the graphs of these (K, uniform), all of them ragged, of a functional `step` into `folder`.

    `folder` must exist. The engine of the longest K is rank0.engine, the others are rank0_k<K>.engine.

    report: is called with what is being done. constraints: graphs take constraints on the logits and return them.
    sizes: largest sizes that the engines must take; its draft_len is used only for a step that does not verify drafts
    in its graph. trt, cuda, plugin_of: by default TensorRT, the GPU and TensorRT's registry. own_layers: networks have
    TensorRT's own layers only, and this is what a plan requires of the machine that runs it.

    DependencyError if a plugin's kernel is not compiled, UnsupportedError for weights that TensorRT does not take,
    EngineError if TensorRT does not build an engine.
    """
    options = options or TensorRTOptions()
    real = plugin_of is None and own_layers is None
    trt = trt or load_tensorrt()
    needs = own_layers if own_layers is not None else _needs(made_for(trt, cuda or open_cuda()), options)
    plugin_of = plugin_of or (no_plugin if own_layers is not None else registered_plugins(trt))
    graphs = []
    weights: dict[str, torch.Tensor] = {}  # weights that all graphs share
    for i, (K, _) in enumerate(sorted(wanted, reverse=True)):
        report(f"graph for K = {K}: exporting")
        if sizes.linear:
            block_size = 16  # for the example alone: caches of the network's shape need not be allocated here
        example = example_for(step, K, block_size, constraints=constraints)
        model = export_onnx(step, example, example_kv(step, example, block_size))
        write_linears(model, "tensorrt" if own_layers is None else "tensorrt_rtx")
        if own_layers is not None:
            inline_ops(model)
        if real:
            with _kernels_for(options):
                check_kernels(model, sizes.linear)
        names = tuple(str(value.name) for value in model.graph.inputs[: -2 * len(step.kv_layers)])
        names = (SLOT_ROWS,) * sizes.linear + names  # constraints stay last
        largest = sizes.at_draft_len(step, K)
        shapes = profiles(names, step.kv_layers, largest, options.opt_num_tokens, step.hidden_width, step.vocab_size)
        report(f"graph for K = {K}: building")
        file = "rank0.engine" if i == 0 else f"rank0_k{K}.engine"
        linear = (sizes.blocks - 1, sizes.block_size) if sizes.linear else None
        with _kernels_for(options) if own_layers is None else nullcontext():
            plan, used = build_plan(trt, model, shapes, options, plugin_of, linear)
        (folder / file).write_bytes(plan)
        if options.strip_plan:
            if any(name in weights and not torch.equal(weights[name], tensor) for name, tensor in used.items()):
                raise EngineError("graphs of two draft lengths have other weights of one name; please report this")
            weights |= used
        graphs.append(Graph(file, K, False, names))
    if weights:
        save_weight_file(weights, folder / WEIGHTS)
    compiled = CompiledStep.of(step, graphs[::-1], constraints)
    return replace(compiled, made_for=dict(needs), kv_blocks=sizes.blocks, linear=sizes.linear)


def _kernels_for(options: TensorRTOptions) -> AbstractContextManager[None]:
    """Return a context in which plugins get kernels that run wherever the plan may run."""
    from trtspec_plugins.tensorrt.device import oldest

    kernels: AbstractContextManager[None] = oldest("sm_80" if options.hardware_compatibility == "ampere_plus" else None)
    return kernels


def _needs(here: Mapping[str, str], options: TensorRTOptions) -> dict[str, str]:
    """Return the properties of this machine that a plan requires of the machine that runs it."""
    free = {"tensorrt" if options.version_compatible else "tensorrt major version"}
    if options.hardware_compatibility != "none":
        free.add("gpu")
    if options.hardware_compatibility == "ampere_plus":
        free.add("compute_capability")
    return {what: value for what, value in here.items() if what not in free}
