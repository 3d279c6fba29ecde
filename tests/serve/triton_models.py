"""The Triton models on real engines, with a double of the server, for the tests of the models."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.e2e.tiny import add_tokenizer, make_target
from tests.serve.pb_double import InferenceResponse, Request, make_pb
from trtspec import LLM, SamplingParams
from trtspec.serve.triton.backend import LlmApiModel
from trtspec.serve.triton.classic import BlsModel, EngineModel, Postprocessing, Preprocessing
from trtspec.serve.triton.repo import write_repository

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
LIMITS: dict[str, Any] = {"max_batch_size": 8, "num_kv_blocks": 150, "block_size": 4}
PROMPT = "abcabcabcabc"
SAMPLED = SamplingParams(temperature=0.7, seed=5, max_tokens=40)


SENT = {
    "llmapi": {
        "sampling_param_temperature": 0.7,
        "sampling_param_seed": 5,
        "sampling_param_max_tokens": 40,
    },
    "classic": {"temperature": 0.7, "seed": 5, "max_tokens": 40},
}
STREAM = {"llmapi": "streaming", "classic": "stream"}
STOP = {"llmapi": "sampling_param_stop", "classic": "stop_words"}
both = pytest.mark.parametrize("layout", ["llmapi", "classic"])


def make_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the checkpoint; a fixture."""
    folder = make_target(tmp_path_factory.mktemp("triton"))
    add_tokenizer(folder)
    return folder


def plain(target: Path) -> Iterator[LLM]:
    """Yield plain decoding of the same model; a fixture."""
    with LLM(target, **LIMITS) as llm:
        yield llm


def loaded(model: Any, repository: Path, pb: SimpleNamespace, decoupled: bool = True) -> Any:
    """Initialise the model as the server does."""
    folder = repository / model.spec.name
    config = {
        "model_transaction_policy": {"decoupled": decoupled},
        "parameters": {"tokenizer_dir": {"string_value": pb.tokenizer_dir}},
    }
    args = {"model_config": json.dumps(config), "model_name": model.spec.name}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", pb)
        model.initialize({**args, "model_repository": str(folder), "model_version": "1"})
    return model


def layouts(target: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Yield load(layout, decoupled, checkpoint) -> the model that clients call, with `.pb`; a fixture.

    Equal arguments return the same model. The models are unloaded at the end.
    """
    open_models: list[Any] = []

    @functools.cache
    def load_layout(layout: str, decoupled: bool = True, checkpoint: Path = target) -> Any:
        repository = tmp_path / f"{len(open_models)}" / layout
        write_repository(repository, checkpoint, NGRAM, layout=layout, **LIMITS)
        models: dict[str, Any] = {}
        pb = make_pb(models)
        pb.tokenizer_dir = str(checkpoint)
        kinds = [LlmApiModel] if layout == "llmapi" else [Preprocessing, EngineModel, Postprocessing, BlsModel]
        for kind in kinds:
            models[kind.spec.name] = loaded(kind(), repository, pb, decoupled)
        open_models.extend(models.values())
        called = models["tensorrt_llm" if layout == "llmapi" else "tensorrt_llm_bls"]
        called.models = models
        return called

    yield load_layout
    for model in reversed(open_models):
        if hasattr(model, "finalize"):
            model.finalize()


def ask(model: Any, request_id: str = "", **inputs: Any) -> Request:
    """Send one request and return at once."""
    arrays = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    request = Request(arrays, request_id, outputs=[spec.name for spec in model.spec.outputs])
    model.execute([request])
    return request


def outputs(response: InferenceResponse) -> dict[str, Any]:
    """Return the first element of each output."""
    assert not response.has_error(), response.error().message()
    return {tensor.name(): tensor.as_numpy().ravel()[0] for tensor in response.output_tensors()}


def tensor(response: InferenceResponse, name: str) -> np.ndarray:
    """Return one output unchanged."""
    [found] = [one for one in response.output_tensors() if one.name() == name]
    return found.as_numpy()


def text(responses: Sequence[InferenceResponse]) -> str:
    return b"".join(outputs(response)["text_output"] for response in responses).decode()


def error(request: Request) -> str:
    [response] = request.sender
    assert response.has_error()
    return response.error().message()


@contextlib.contextmanager
def slowed_down(engine: Any, pause: float = 0.15) -> Iterator[None]:
    """Pause before each of the engine's steps, so that a client has time to leave.

    By default, the pause is longer than the interval between two checks for clients that left.
    """
    core = engine.llm.engine
    step = core.step

    def slow() -> Any:
        time.sleep(pause)
        return step()

    core.step = slow
    try:
        yield
    finally:
        core.step = step


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
