"""The part of `triton_python_backend_utils` that trtspec's models call, without a server.

A test passes requests to a model and collects its responses.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

FINAL = 1
TIMEOUT = 60


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    @classmethod
    def from_dlpack(cls, name: str, tensor: torch.Tensor) -> Tensor:
        return cls(name, tensor.numpy())

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError:
    UNKNOWN, INTERNAL, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, CANCELLED = range(6)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Sender:
    """A collector of the responses to one request; it asserts the server's rule that nothing follows FINAL."""

    def __init__(self) -> None:
        self.responses: queue.Queue[tuple[InferenceResponse | None, int]] = queue.Queue()
        self.cancelled = self.closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.closed, "a response after the final one"
        self.closed = flags == FINAL
        self.responses.put((response, flags))

    def is_cancelled(self) -> bool:
        assert not self.closed, "the server has closed this sender"
        return self.cancelled

    def __iter__(self) -> Iterator[InferenceResponse]:
        """Iterate over the responses up to the final one."""
        while True:
            response, flags = self.responses.get(timeout=TIMEOUT)
            if response is not None:
                yield response
            if flags == FINAL:
                return


class Request:
    """A request as a model receives it: arrays by name, of strings (as bytes) or of numbers."""

    def __init__(
        self, inputs: Mapping[str, Any], request_id: str = "", parameters: str = "", outputs: Sequence[str] = ()
    ) -> None:
        self._inputs = [Tensor(name, _array(value)) for name, value in inputs.items()]
        self._request_id, self._parameters, self._outputs = request_id, parameters, outputs
        self.sender = Sender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def requested_output_names(self) -> Sequence[str]:
        return self._outputs

    def parameters(self) -> str:
        return self._parameters

    def get_response_sender(self) -> Sender:
        return self.sender


def _array(value: Any) -> np.ndarray:
    array = np.array(value)
    return array.astype("S").astype(np.object_) if array.dtype.kind in "SU" else array


class Metric:
    def __init__(self, values: dict[str, float], name: str) -> None:
        self._values, self._name = values, name

    def increment(self, change: float) -> None:
        self._values[self._name] = self._values.get(self._name, 0) + change


def make_pb(models: Mapping[str, Any] | None = None) -> SimpleNamespace:
    """Make the module; its `metrics` hold what was counted.

    models: those that InferenceRequest can call, by name.
    """
    metrics: dict[str, float] = {}

    class MetricFamily:
        COUNTER, GAUGE = range(2)

        def __init__(self, name: str, description: str, kind: int) -> None:
            self.name = name

        def Metric(self, labels: Mapping[str, str]) -> Metric:
            return Metric(metrics, self.name)

    class InferenceRequest(Request):
        def __init__(
            self, model_name: str, request_id: str, requested_output_names: Sequence[str], inputs: Sequence[Tensor]
        ) -> None:
            super().__init__({}, request_id, outputs=requested_output_names)
            self._inputs, self._model = list(inputs), (models or {})[model_name]

        def exec(self, decoupled: bool = False) -> Any:
            returned = self._model.execute([self])
            if not decoupled:
                return returned[0] if returned else next(iter(self.sender))
            return itertools.chain(self.sender, [InferenceResponse()])

    return SimpleNamespace(
        Tensor=Tensor,
        TritonError=TritonError,
        InferenceResponse=InferenceResponse,
        InferenceRequest=InferenceRequest,
        MetricFamily=MetricFamily,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        metrics=metrics,
    )
