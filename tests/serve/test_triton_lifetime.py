"""The Triton models on real engines: requests that are cancelled or stopped, and engines that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.triton_models import (
    LIMITS,
    PROMPT,
    SAMPLED,
    SENT,
    STREAM,
    ask,
    both,
    error,
    layouts,
    make_model,
    outputs,
    plain,
    slowed_down,
    text,
    wait_until,
)
from trtspec import LLM
from trtspec.errors import DeviceError
from trtspec.serve.triton import backend as triton_backend

target = pytest.fixture(scope="module")(make_model)
offline = pytest.fixture(scope="module")(plain)
fresh = pytest.fixture(layouts)


@pytest.fixture(scope="module")
def load(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`fresh`, but a model serves all tests that ask for it."""
    yield from layouts(target, tmp_path_factory.mktemp("repositories"))


def aborted(engine: Any) -> int:
    """Return the number of requests that were aborted so far."""
    return int(engine.llm.get_metrics().finished.get("abort", 0))


@both
@pytest.mark.parametrize("streaming", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_client_that_goes_frees_its_request(load: Callable[..., Any], layout: str, streaming: bool) -> None:
    model = load(layout)
    engine = model.models["tensorrt_llm"]
    before = aborted(engine)
    with slowed_down(engine):
        request = ask(model, text_input=PROMPT, **SENT[layout], **{STREAM[layout]: streaming})
        wait_until(lambda: engine.llm.num_kv_blocks_in_use > 0)
        request.sender.cancelled = True
        responses = list(request.sender)
    assert responses[-1].error().code() == model.pb.TritonError.CANCELLED
    wait_until(lambda: engine.llm.num_kv_blocks_in_use == 0)
    assert aborted(engine) == before + 1
    wait_until(lambda: engine.pb.metrics.get("trtspec_steps_total") == engine.llm.get_metrics().steps)
    wait_until(lambda: not engine.pb.metrics.get("trtspec_running_requests"))


def test_the_metrics_tell_steps_with_drafts_from_those_without(load: Callable[..., Any]) -> None:
    model = load("llmapi")
    list(ask(model, text_input=PROMPT, sampling_param_max_tokens=12).sender)
    stats, told = model.llm.get_metrics().speculation, model.pb.metrics
    wait_until(lambda: told.get("trtspec_generation_steps_total") == stats.steps)
    assert 0 < stats.num_drafts == told["trtspec_drafts_total"] < stats.steps
    length = 1 + told["trtspec_accepted_draft_tokens_total"] / told["trtspec_drafts_total"]
    assert length == pytest.approx(stats.acceptance_length)


@pytest.mark.parametrize("decoupled", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_client_that_goes_is_not_waited_for(load: Callable[..., Any], decoupled: bool) -> None:
    """A client that leaves is not waited for, also while its request waits for others, which fill the engine.

    The same holds where a request is answered once.
    """
    model = load("classic", decoupled)
    engine = model.models["tensorrt_llm"]
    before, tokens = aborted(engine), engine.llm.get_metrics().output_tokens
    ids = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 40, "end_id": -1}
    with slowed_down(engine):
        for _ in range(LIMITS["max_batch_size"]):
            ask(engine, "others", **ids)
        wait_until(lambda: engine.llm.get_metrics().output_tokens > tokens)
        request = ask(model, text_input=PROMPT, **SENT["classic"])
        wait_until(lambda: len(engine._running) > LIMITS["max_batch_size"])
        request.sender.cancelled = True
        assert "cancelled by its client" in error(request)
        assert aborted(engine) == before + 1
        ask(engine, "others", **{**ids, "stop": True})
    wait_until(lambda: not engine._running)


def fail(engine: Any) -> None:
    """Make the engine fail from its next step on."""
    engine.llm.engine.step = gone


def gone(*_: Any, **__: Any) -> Any:
    raise DeviceError("the GPU is gone")


@both
def test_an_engine_that_fails_is_replaced(fresh: Callable[..., Any], offline: LLM, layout: str) -> None:
    model = fresh(layout)
    engine = model.models["tensorrt_llm"]
    list(ask(model, text_input=PROMPT, **SENT[layout]).sender)
    wait_until(lambda: engine.pb.metrics.get("trtspec_output_tokens_total", 0) > 0)
    counted = dict(engine.pb.metrics)
    failed = engine.llm
    fail(engine)
    assert "the GPU is gone" in error(ask(model, text_input=PROMPT, **SENT[layout]))
    wait_until(lambda: engine.llm is not failed)
    [response] = ask(model, text_input=PROMPT, **SENT[layout]).sender
    assert outputs(response)["text_output"].decode() == offline.generate(PROMPT, SAMPLED)[0].outputs[0].text
    assert engine.is_model_ready()
    wait_until(lambda: engine.pb.metrics["trtspec_output_tokens_total"] > counted["trtspec_output_tokens_total"])
    assert (engine.pb.metrics["trtspec_engine_up"], engine.pb.metrics["trtspec_engine_failures_total"]) == (1, 1)


def test_a_server_that_can_have_no_engine_ends(monkeypatch: pytest.MonkeyPatch, fresh: Callable[..., Any]) -> None:
    """A server that can have no engine ends; until then it is not ready and takes no requests."""
    model = fresh("llmapi")
    ended: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "kill", lambda *of: ended.append(of))
    monkeypatch.setattr(os, "_exit", lambda status: ended.append((status,)))
    monkeypatch.setattr(triton_backend, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(triton_backend, "LLM", gone)
    fail(model)
    assert "the GPU is gone" in error(ask(model, text_input=PROMPT))
    wait_until(lambda: len(ended) > 1)
    assert ended[:2] == [(os.getppid(), signal.SIGTERM), (1,)]
    assert not model.is_model_ready()
    assert model.pb.metrics["trtspec_engine_up"] == 0
    [refused] = ask(model, text_input=PROMPT).sender
    assert refused.error().code() == model.pb.TritonError.UNAVAILABLE


def test_a_request_is_stopped_by_its_id(load: Callable[..., Any], offline: LLM) -> None:
    model = load("llmapi")
    asked = {"text_input": PROMPT, "sampling_param_max_tokens": 500, "return_finish_reason": True}
    tokens = model.llm.get_metrics().output_tokens
    with slowed_down(model, pause=0.02):
        one, other = ask(model, "one", **asked), ask(model, "other", text_input=PROMPT, **SENT["llmapi"])
        wait_until(lambda: model.llm.get_metrics().output_tokens > tokens)
        [answer] = ask(model, "one", text_input="", stop=True).sender
        assert not answer.has_error()
        [response] = one.sender
        assert outputs(response)["finish_reason"] == b"abort"
    assert text(list(other.sender)) == offline.generate(PROMPT, SAMPLED)[0].outputs[0].text
    assert "request id" in error(ask(model, text_input="", stop=True))
