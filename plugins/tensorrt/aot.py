"""The plugins' AOT form: a kernel as PTX with how to launch it, which TensorRT keeps in the engine.

SpecSample, SpecSampleVocab and SpecAccept have one; the other plugins have the JIT form alone. The PTX is compiled
beforehand, by `build_scripts/build_plugins.py --target tensorrt`, for the GPU that builds the engine or for
$TRTSPEC_CUDA_ARCH (sm_90, say).

TensorRT launches a kernel with the inputs' pointers, the integers given here, and the outputs' pointers, in that order
(tensorrt.plugin.aot_impl's documentation; integers are 32 bits wide). That the PTX declares just these is tested; that
TensorRT launches it, with these grids, is not, as that needs a GPU.

TensorRT reads the annotations as objects: no `from __future__ import annotations`. An aot_impl function must name all
of a plugin's attributes, in order.
"""

import os
from collections.abc import Sequence
from typing import Any

import tensorrt.plugin as trtp
import torch
from trtspec_plugins.tensorrt import jit  # noqa: F401  (registers what is completed here)
from trtspec_plugins.tensorrt.build import compiled_for, folder

Launch = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]


def _architecture() -> str:
    asked = os.environ.get("TRTSPEC_CUDA_ARCH")
    if asked:
        return asked
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU to compile an engine for: set TRTSPEC_CUDA_ARCH (sm_90, say)")
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _launch(plugin: str, programs: Any, integers: Sequence[Any]) -> Launch:
    """One block of threads per program."""
    compiled = compiled_for(plugin, _architecture())
    parameters = trtp.KernelLaunchParams()
    parameters.grid_x = programs
    parameters.block_x = compiled.num_threads
    parameters.shared_mem = compiled.shared_bytes
    arguments = trtp.SymIntExprs(len(integers))
    for index, integer in enumerate(integers):
        arguments[index] = trtp.SymInt32(integer)
    return compiled.entry, (folder() / compiled.file).read_text(encoding="utf-8"), parameters, arguments


@trtp.aot_impl("trtspec::SpecAccept")
def _(sampled, draft_tokens, draft_lens, forced_accept, emits, outputs, tactic) -> Launch:
    B, K = draft_tokens.shape_expr[0], draft_tokens.shape_expr[1]
    return _launch("SpecAccept", B, [K])


@trtp.aot_impl("trtspec::SpecSample")
def _(logits, greedy, seeds, positions, outputs, tactic) -> Launch:
    R, V = logits.shape_expr[0], logits.shape_expr[1]
    return _launch("SpecSample", R, [V, seeds.shape_expr[0]])


@trtp.aot_impl("trtspec::SpecSampleVocab")
def _(logits, greedy, seeds, positions, vocab_ids, outputs, tactic) -> Launch:
    R, V = logits.shape_expr[0], logits.shape_expr[1]
    return _launch("SpecSampleVocab", R, [V, seeds.shape_expr[0]])
