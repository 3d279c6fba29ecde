"""The Triton models on real engines: requests that are given up or stopped, and engines that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.triton_models import (
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
    slow_down,
    text,
    wait_until,
)
from trtspec import LLM

target = pytest.fixture(scope="module")(make_model)
offline = pytest.fixture(scope="module")(plain)
load = pytest.fixture(layouts)


@both
@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_goes_frees_its_request(load: Callable[..., Any], layout: str, streaming: bool) -> None:
    model = load(layout)
    engine = model.models["tensorrt_llm"]
    slow_down(engine)
    request = ask(model, text_input=PROMPT, **SENT[layout], **{STREAM[layout]: streaming})
    wait_until(lambda: engine.llm.num_kv_blocks_in_use > 0)
    request.sender.cancelled = True
    responses = list(request.sender)
    assert responses[-1].error().code() == model.pb.TritonError.CANCELLED
    wait_until(lambda: engine.llm.num_kv_blocks_in_use == 0)
    assert engine.llm.get_metrics().finished == {"abort": 1}
    wait_until(lambda: engine.pb.metrics.get("trtspec_steps_total") == engine.llm.get_metrics().steps)
    wait_until(lambda: not engine.pb.metrics.get("trtspec_running_requests"))


def test_a_request_is_stopped_by_its_id(load: Callable[..., Any], offline: LLM) -> None:
    model = load("llmapi")
    slow_down(model)
    asked = {"text_input": PROMPT, "sampling_param_max_tokens": 500, "return_finish_reason": True}
    one, other = ask(model, "one", **asked), ask(model, "other", text_input=PROMPT, **SENT["llmapi"])
    wait_until(lambda: model.llm.get_metrics().output_tokens > 0)
    [answer] = ask(model, "one", text_input="", stop=True).sender
    assert not answer.has_error()
    [response] = one.sender
    assert outputs(response)["finish_reason"] == b"abort"
    assert text(list(other.sender)) == offline.generate(PROMPT, SAMPLED)[0].outputs[0].text
    assert "request id" in error(ask(model, text_input="", stop=True))
