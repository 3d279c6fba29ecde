"""Tensors of Triton's python backend, in and out, with numpy 1 and with numpy 2.

`triton_python_backend_utils` exists inside the server alone; it is passed around as `pb`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trtspec.errors import RequestError
from trtspec.serve.triton.configs import TensorSpec

Values = Mapping[str, list[Any]]
"""Tensors by name: the elements of each, all dimensions in a row; strings are str."""

_DTYPES = {"BOOL": torch.bool, "INT32": torch.int32, "UINT64": torch.uint64, "FP32": torch.float32}


def read_inputs(request: Any, specs: Sequence[TensorSpec]) -> dict[str, list[Any]]:
    """The inputs of a pb.InferenceRequest. RequestError naming the tensor: one that is refused or that we do not know,
    text that is not UTF-8, more than one element where one is meant."""
    # Triton's generate calls turn each field that is no input of the model into a parameter.
    for name in json.loads(request.parameters() or "{}"):
        if not name.startswith("triton_"):
            raise RequestError(f"{name} is no input of this model; inputs are {', '.join(spec.name for spec in specs)}")
    values = read_tensors(request.inputs(), specs)
    for spec in specs:
        elements = values.get(spec.name)
        if elements is None:
            continue
        if spec.refused is not None and not set(elements) <= set(spec.neutral):
            raise RequestError(f"input {spec.name}: {spec.refused}")
        if spec.dims == (1,) and len(elements) != 1:
            raise RequestError(f"input {spec.name} has {len(elements)} elements; give one")
    return values


def read_tensors(tensors: Iterable[Any], specs: Sequence[TensorSpec]) -> dict[str, list[Any]]:
    """Of pb.Tensors, those of `specs`. RequestError for text that is not UTF-8."""
    known = {spec.name: spec for spec in specs}
    return {tensor.name(): _elements(tensor, known[tensor.name()]) for tensor in tensors}


def _elements(tensor: Any, spec: TensorSpec) -> list[Any]:
    elements = tensor.as_numpy().ravel().tolist()
    try:
        return [text.decode() for text in elements] if spec.dtype == "STRING" else elements
    except UnicodeDecodeError as error:
        raise RequestError(f"{spec.name} is not UTF-8 ({error}); encode it so") from error


def requested(request: Any, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The outputs that a pb.InferenceRequest wants. Others must not be given to its response sender: tritonserver 2.51
    frees them without holding the interpreter's lock, which corrupts memory."""
    names = set(request.requested_output_names())
    return [spec for spec in specs if spec.name in names]


def make_tensors(pb: Any, specs: Sequence[TensorSpec], values: Values, batched: bool) -> list[Any]:
    """A pb.Tensor for each of `specs` that has values. batched: with a batch dimension of 1 before its own."""
    return [_tensor(pb, spec, values[spec.name], batched) for spec in specs if spec.name in values]


def _tensor(pb: Any, spec: TensorSpec, elements: Sequence[Any], batched: bool) -> Any:
    shape = [1] * batched + _shape(spec.dims, len(elements))
    if spec.dtype == "STRING":
        return pb.Tensor(spec.name, np.array([text.encode() for text in elements], dtype=np.object_).reshape(shape))
    # Not an array of numpy: servers may take it for empty (see triton_numpy), nor its capsule, which they break.
    return pb.Tensor.from_dlpack(spec.name, torch.tensor(elements, dtype=_DTYPES[spec.dtype]).reshape(shape))


def _shape(dims: Sequence[int], count: int) -> list[int]:
    """Of `count` elements: the last -1 takes what there is, others are 1."""
    shape = [1 if dim == -1 else dim for dim in dims]
    if -1 in dims:
        shape[len(dims) - 1 - list(dims)[::-1].index(-1)] = count // math.prod(shape)
    return shape
