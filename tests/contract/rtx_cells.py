"""Cells of the grid that the TensorRT-RTX builder is asked to build: a mode, K, a dtype, a quantisation.

A cell's graphs are exported and written once, and built for every architecture of SMS. Networks with attention "plugin"
have our plugins cut out (rtx_builder.py). Those with "native" are whole, as backend tensorrt_rtx builds them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.contract.modes import RECIPES, Models
from tests.contract.rtx_builder import CutShapes, CutTensorRT, cut_plugin_of
from trtspec.backends.export import example_for, example_kv
from trtspec.backends.graph_io import SLOT_ROWS
from trtspec.backends.onnx.export import export_onnx
from trtspec.backends.onnx.linear import write_linears
from trtspec.backends.table import BACKENDS
from trtspec.backends.tensorrt.compile import build_plan, no_plugin
from trtspec.backends.tensorrt.inline import inline_ops
from trtspec.backends.tensorrt.profiles import Profile, TensorRTOptions, profiles
from trtspec.build.build import described_steps, largest_sizes, wanted_graphs, with_linear_cache
from trtspec.build.context import plan_context
from trtspec.config.engine import EngineConfig
from trtspec.errors import EngineError, TrtSpecError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.step import Step
from trtspec.modes import SpeculativeDecodingMode as M

SMS = (89, 120)
DTYPES = ("float32", "float16", "bfloat16")
QUANTISATIONS = (None, "int8", "int4")
LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 64, "max_seq_len": 96, "block_size": 8}


@dataclass(frozen=True)
class Cell:
    """The result of a cell. verdict: "builds", "refused: our reason", or "builder: its text"."""

    mode: str
    K: int
    dtype: str
    quantization: str | None
    attention: str  # as in TensorRTOptions
    verdict: str
    megabytes: float = 0.0  # of all plans of one architecture
    export_s: float = 0.0
    build_s: float = 0.0  # of one architecture


def check(models: Models, mode: M, K: int, dtype: str, quantization: str | None, attention: str) -> Cell:
    """Build the graphs of a cell for all architectures."""
    options = TensorRTOptions(attention=attention)
    began, size, built = time.perf_counter(), 0, 0.0

    def cell(verdict: str) -> Cell:
        spent = time.perf_counter() - began - built
        one = built / len(SMS)
        times = round(spent, 1), round(one, 2)
        return Cell(mode.name, K, dtype, quantization, attention, verdict, round(size / 1e6, 2), *times)

    try:
        for role, step, sizes, draft_len in _graphs(models, mode, K, dtype, quantization, options):
            block_size = LIMITS["block_size"]  # of the example; the caches of a network may have others
            example = example_for(step, draft_len, block_size, constraints=role == "target" and not options.native)
            model = export_onnx(step, example, example_kv(step, example, block_size))
            write_linears(model, "tensorrt_rtx" if options.native else "tensorrt")
            if options.native:
                inline_ops(model)
            names = tuple(str(value.name) for value in model.graph.inputs[: -2 * len(step.kv_layers)])
            names = (SLOT_ROWS,) * sizes.linear + names
            linear = (sizes.blocks - 1, sizes.block_size) if sizes.linear else None
            own = no_plugin if options.native else cut_plugin_of
            for sm in SMS:
                start = time.perf_counter()
                trt = CutTensorRT(model, sm, options.native)
                largest = sizes.at_draft_len(step, draft_len)
                shapes = profiles(names, step.kv_layers, largest, None, step.hidden_width, step.vocab_size)
                cut = [Profile(one.name, CutShapes(one, trt)) for one in shapes]
                try:
                    plan, _ = build_plan(trt, model, cut, options, own, linear)
                except EngineError as error:
                    said = " / ".join(trt.log.errors()) or str(error)
                    return cell(f"builder: {said}")
                size += len(plan) if sm == SMS[0] else 0
                built += time.perf_counter() - start
    except TrtSpecError as error:
        return cell(f"refused: {error}")
    return cell("builds")


def _graphs(
    models: Models, mode: M, K: int, dtype: str, quantization: str | None, options: TensorRTOptions
) -> Iterator[tuple[str, Step, Any, int]]:
    """Yield (role, step, its largest sizes, K of the graph) of each graph of a cell's engine."""
    backend = replace(BACKENDS["tensorrt_rtx" if options.native else "tensorrt"], verified=None)  # the builder decides
    recipe = None if mode is M.NONE else RECIPES[mode]
    speculation = None if recipe is None else read_speculative_config(recipe.speculation(models, K))
    config = EngineConfig(backend="tensorrt", dtype=dtype, quantization=quantization, **LIMITS)
    target = models.folder("target" if recipe is None else recipe.target)
    context = plan_context(target, speculation, config, backend)
    if options.native:
        context = with_linear_cache(context)
    for role, step in described_steps(context, lambda what: None).items():
        sizes = largest_sizes(context, role, options)
        for draft_len, _ in wanted_graphs(context, role, step):
            yield role, step, sizes, draft_len
