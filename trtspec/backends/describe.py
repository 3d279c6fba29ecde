"""Inputs, op calls and outputs of a step's graphs, found by a run on tensors that have shapes but no data.

No graph is exported: on torch's meta device a whole step of a large model takes a fraction of a second and no memory.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trtspec.backends.export import GraphStep
from trtspec.backends.graph_io import INPUTS, OUTPUTS, SLOT_ROWS, input_names, output_names
from trtspec.backends.sizes import LOGITS_DEPTH, Sizes
from trtspec.core import KVLayer
from trtspec.errors import UnsupportedError
from trtspec.methods.step import Step

_LINEARS = ("packed_linear", "packed_embedding")
_LINEAR_PLUGINS = {"logits": ("LinearLogits",), "groups": ("QuantizeGroups", "GroupsLinear")}


@dataclass(frozen=True)
class TensorPlan:
    """An input or output. Dynamic sizes of its shape are names.

    The names include B requests, T rows, R logits rows, G generations and K.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]


@dataclass(frozen=True)
class Calls:
    """An op of trtspec.ops, or a plugin for it, with the tensors it gets and the number of such calls in a graph.

    form: what a plugin depends on in addition. "logits": a linear with fp32 results of a matrix in bf16 or fp16.
    "groups": a linear with weights in groups. "chained": attention over a cache that other calls change as well.
    """

    name: str
    inputs: tuple[str, ...]
    count: int
    form: str = ""


@dataclass(frozen=True)
class GraphPlan:
    """One graph. The KV layers, which it takes as well, are not listed. kind: "ragged" or "uniform"."""

    kind: str
    draft_len: int
    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    calls: tuple[Calls, ...]


def describe_graph(
    step: Step, sizes: Sizes, kind: str, draft_len: int, functional: bool, constraints: bool = False
) -> GraphPlan:
    """Describe the graph of a kind ("ragged" or "uniform") with K = draft_len.

    A functional graph does not take a tree mask, because it does not read one. step: a step on the meta device. sizes:
    the largest sizes of the graph's launches. constraints: same meaning as in graph_io.input_names.
    """
    uniform = kind == "uniform"
    names = input_names(step, uniform, constraints=constraints)
    R = sizes.batch_size * ((draft_len if uniform else sizes.draft_len) + 1)
    open_sizes = {"T": R if uniform else sizes.rows, "R": R, "B": sizes.batch_size, "G": sizes.batch_size}
    open_sizes |= {"K": draft_len, "columns": sizes.columns, "bans": 1, "0": 0, "width": step.hidden_width}
    open_sizes |= {"known": 1, "kinds": 3, "biases": 1, "words": 1}
    dtype = step.like.dtype
    with torch.device("meta"), torch.no_grad(), _Recorder() as recorder:
        tensors = {
            name: torch.empty(INPUTS[name].shape(open_sizes), dtype=INPUTS[name].dtype or dtype) for name in names
        }
        shapes = [(sizes.blocks, sizes.block_size, heads, width) for heads, width, _ in step.kv_layers]
        kv: list[KVLayer] = [(torch.empty(s, dtype=dtype), torch.empty(s, dtype=dtype)) for s in shapes]
        given, _ = GraphStep(step, draft_len, draft_len + 1 if uniform else 0).eval()(tensors, kv)
    fixed: dict[str, str | int] = {"0": 0, "width": step.hidden_width}
    return GraphPlan(
        kind,
        draft_len,
        tuple(
            TensorPlan(
                name, _name(INPUTS[name].dtype or dtype), tuple(fixed.get(size, size) for size in INPUTS[name].dims)
            )
            for name in (*names, *[SLOT_ROWS] * sizes.linear)
            if not (functional and "0" in INPUTS[name].dims)
        ),
        tuple(_output(name, given[name]) for name in output_names(step, constraints)),
        recorder.calls(),
    )


def plugins(calls: Sequence[Calls], native: bool = False) -> tuple[Calls, ...]:
    """Return the TensorRT plugins that replace a graph's calls.

    Most linears and embeddings become TensorRT's own layers, and so does attention if `native` is set. UnsupportedError
    for a call that has no plugin.
    """
    signatures: Any = importlib.import_module("trtspec_plugins.tensorrt.signatures")  # does not need TensorRT
    made: Counter[str] = Counter()
    for call in calls:
        if call.name in _LINEARS:
            made.update(dict.fromkeys(_LINEAR_PLUGINS.get(call.form, ()), call.count))
        elif not (native and call.name == "spec_attention"):
            op = call.name.title().replace("_", "")
            try:
                made[signatures.plugin_of(op, call.inputs, call.form == "chained")] += call.count
            except LookupError as error:
                raise UnsupportedError(f"backend tensorrt: {error}") from error
    return tuple(Calls(f"trtspec::{name}", signatures.PLUGINS[name].inputs, count) for name, count in made.items())


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of calls of our ops, by op and by the tensors given.

    An optional tensor that is left out has one dimension and no elements.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[str, tuple[str, ...], str]] = []
        self._writers: dict[int, int] = {}  # id of a new cache -> place in _calls
        self._kept: list[object] = []  # so that no id is used again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "trtspec":
            arguments = [argument.name for argument in func._schema.arguments]
            given = dict(zip(arguments, args, strict=False)) | dict(kwargs or {})
            present = tuple(name for name in arguments if _is_used(given.get(name)))
            name = func._schema.name.removeprefix("trtspec::")
            self._calls.append((name, present, _linear_form(given) if name == "packed_linear" else ""))
            result = func(*args, **(kwargs or {}))
            if name == "spec_attention":
                self._note_caches(given["k_cache"], result[1])
            return result
        return func(*args, **(kwargs or {}))

    def _note_caches(self, old: Tensor, new: Tensor) -> None:
        """Mark the last call, and the one that made its old cache, as chained if there is such a call."""
        place = len(self._calls) - 1
        before = self._writers.get(id(old))
        for one in () if before is None else (before, place):
            self._calls[one] = (*self._calls[one][:2], "chained")
        self._writers[id(new)] = place
        self._kept.append(new)

    def calls(self) -> tuple[Calls, ...]:
        """Return the calls with their counts, in the order in which each occurred first."""
        counts = Counter(self._calls)
        return tuple(Calls(name, inputs, count, form) for (name, inputs, form), count in counts.items())


def _linear_form(given: Mapping[str, Any]) -> str:
    """Form of a call of packed_linear, as in Calls. backends/onnx/linear.py decides alike."""
    x, weight = given["x"], given["weight"]
    if given["scales"].ndim == 3:
        return "groups"
    floats = weight.dtype == x.dtype and x.dtype != torch.float32
    served = given["float_out"] and given["bias"] is None and x.shape[1] % LOGITS_DEPTH == 0
    return "logits" if floats and served else ""


def _is_used(value: object) -> bool:
    return isinstance(value, Tensor) and not (value.ndim == 1 and value.numel() == 0)


def _output(name: str, tensor: Tensor) -> TensorPlan:
    known = OUTPUTS[name].dims
    return TensorPlan(name, _name(tensor.dtype), (*known, *tensor.shape[len(known) :]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
