"""Input and output tensors of Triton's python backend, with numpy 1 and with numpy 2.

The module `triton_python_backend_utils` exists only inside the server; functions take it as `pb`.
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
"""Name of a tensor -> its elements, flattened; strings are str."""

_DTYPES = {"BOOL": torch.bool, "INT32": torch.int32, "UINT64": torch.uint64, "FP32": torch.float32}

HEADERS = (
    "accept", "authorization", "b3", "baggage", "connection", "cookie", "forwarded", "host", "origin", "referer",
    "traceparent", "tracestate",
)  # fmt: skip
"""Headers without a hyphen that servers forward. Other headers have one, and inputs have none."""


def read_inputs(request: Any, specs: Sequence[TensorSpec]) -> dict[str, list[Any]]:
    """Inputs of a pb.InferenceRequest, by name.

    Raises RequestError naming the tensor: for a refused or unknown tensor, for text that is not UTF-8, and for a number
    of elements other than one where one is meant.
    """
    # Triton's generate calls turn each field that is not an input of the model into a parameter. So does the server
    # with HTTP headers and gRPC metadata, if it is told to forward them.
    known = {spec.name for spec in specs}
    for name in json.loads(request.parameters() or "{}"):
        is_header = "-" in name and name.replace("-", "_") not in known
        if not (name.startswith("triton_") or is_header or name.lower() in HEADERS):
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
    """Elements of pb.Tensors, by name; `specs` describes the tensors. RequestError for text that is not UTF-8."""
    known = {spec.name: spec for spec in specs}
    return {tensor.name(): _elements(tensor, known[tensor.name()]) for tensor in tensors}


def _elements(tensor: Any, spec: TensorSpec) -> list[Any]:
    elements = tensor.as_numpy().ravel().tolist()
    try:
        return [text.decode() for text in elements] if spec.dtype == "STRING" else elements
    except UnicodeDecodeError as error:
        raise RequestError(f"{spec.name} is not UTF-8 ({error}); encode it so") from error


def requested(request: Any, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Outputs that a pb.InferenceRequest wants.

    Its response sender must not get other outputs: tritonserver 2.51 frees them without the interpreter's lock, which
    corrupts memory.
    """
    names = set(request.requested_output_names())
    return [spec for spec in specs if spec.name in names]


def make_tensors(pb: Any, specs: Sequence[TensorSpec], values: Values, batched: bool) -> list[Any]:
    """A pb.Tensor for each of `specs` that has values. batched: put a batch dimension of 1 before its own."""
    return [_tensor(pb, spec, values[spec.name], batched) for spec in specs if spec.name in values]


def _tensor(pb: Any, spec: TensorSpec, elements: Sequence[Any], batched: bool) -> Any:
    shape = [1] * batched + _shape(spec.dims, len(elements))
    if spec.dtype == "STRING":
        return pb.Tensor(spec.name, np.array([text.encode() for text in elements], dtype=np.object_).reshape(shape))
    # Not a numpy array, which servers may take for empty (numpy_strings says why); not its capsule, which they break.
    return pb.Tensor.from_dlpack(spec.name, torch.tensor(elements, dtype=_DTYPES[spec.dtype]).reshape(shape))


def _shape(dims: Sequence[int], count: int) -> list[int]:
    """Shape of `count` elements: the last -1 in `dims` becomes what fits, any other -1 becomes 1."""
    shape = [1 if dim == -1 else dim for dim in dims]
    if -1 in dims:
        shape[len(dims) - 1 - list(dims)[::-1].index(-1)] = count // math.prod(shape)
    return shape
