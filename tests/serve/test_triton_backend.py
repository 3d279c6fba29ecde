"""The Triton models on real engines, and a double in the place of the server: what goes in, what is answered."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.tiny import add_tokenizer, make_target
from tests.serve.pb_double import InferenceResponse, Request, make_pb
from trtspec import LLM, SamplingParams
from trtspec.errors import RequestError
from trtspec.serve.triton_backend import LlmApiModel
from trtspec.serve.triton_classic import (
    BlsModel,
    EngineModel,
    Postprocessing,
    Preprocessing,
    packed_words,
    unpacked_words,
)
from trtspec.serve.triton_repo import write_repository

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
LIMITS: dict[str, Any] = {"max_batch_size": 8, "num_kv_blocks": 150, "block_size": 4}
PROMPT = "abcabcabcabc"
SAMPLED = SamplingParams(temperature=0.7, seed=5, max_tokens=40)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("triton"))
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def offline(target: Path) -> Iterator[LLM]:
    """Plain decoding of the same model."""
    with LLM(target, **LIMITS) as llm:
        yield llm


def loaded(model: Any, repository: Path, pb: SimpleNamespace, decoupled: bool = True) -> Any:
    """The model as the server initialises it."""
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


@pytest.fixture
def load(target: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """load(layout, decoupled) -> the model that clients call, with `.pb`; unloaded at the end."""
    open_models = []

    def load_layout(layout: str, decoupled: bool = True) -> Any:
        repository = tmp_path / layout
        write_repository(repository, target, NGRAM, layout=layout, **LIMITS)
        models: dict[str, Any] = {}
        pb = make_pb(models)
        pb.tokenizer_dir = str(target)
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
    """First element of each output."""
    assert not response.has_error(), response.error().message()
    return {tensor.name(): tensor.as_numpy().ravel()[0] for tensor in response.output_tensors()}


def text(responses: Sequence[InferenceResponse]) -> str:
    return b"".join(outputs(response)["text_output"] for response in responses).decode()


def error(request: Request) -> str:
    [response] = request.sender
    assert response.has_error()
    return response.error().message()


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


@both
def test_text_is_that_of_plain_decoding(load: Callable[..., Any], offline: LLM, layout: str) -> None:
    model = load(layout)
    [expected] = offline.generate(PROMPT, SAMPLED)
    [response] = ask(model, text_input=PROMPT, **SENT[layout]).sender
    got = outputs(response)
    assert got["text_output"].decode() == expected.outputs[0].text
    assert 0 < got["total_accepted_draft_tokens"] < got["total_draft_tokens"]
    assert got["acceptance_rate"] == pytest.approx(got["total_accepted_draft_tokens"] / got["total_draft_tokens"])


@both
def test_a_stream_has_a_response_for_each_step(load: Callable[..., Any], offline: LLM, layout: str) -> None:
    model = load(layout)
    [expected] = offline.generate(PROMPT, SAMPLED)
    responses = list(ask(model, text_input=PROMPT, **SENT[layout], **{STREAM[layout]: True}).sender)
    assert text(responses) == expected.outputs[0].text
    last = outputs(responses[-1])
    # The prompt's step gives one token, each later one at least one.
    assert len(responses) == len(expected.outputs[0].token_ids) - last["total_accepted_draft_tokens"]
    offered = [outputs(response)["total_draft_tokens"] for response in responses]
    assert offered == sorted(offered)
    assert 1 < len(responses) < 40


@both
def test_text_ends_before_a_stop_word(load: Callable[..., Any], offline: LLM, layout: str) -> None:
    model = load(layout)
    [whole] = offline.generate(PROMPT, SAMPLED)
    stop = whole.outputs[0].text[10:12]
    expected = whole.outputs[0].text.split(stop)[0]
    responses = list(ask(model, text_input=PROMPT, **SENT[layout], **{STOP[layout]: [stop, "zz"]}).sender)
    assert text(responses) == expected != whole.outputs[0].text


@both
def test_unset_sampling_is_greedy(load: Callable[..., Any], offline: LLM, layout: str) -> None:
    model = load(layout)
    [expected] = offline.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    tokens = {"sampling_param_max_tokens" if layout == "llmapi" else "max_tokens": 12}
    assert text(list(ask(model, text_input=PROMPT, **tokens).sender)) == expected.outputs[0].text


@both
@pytest.mark.parametrize("streaming", [False, True])
def test_the_prompt_comes_first_if_asked_for(
    load: Callable[..., Any], offline: LLM, layout: str, streaming: bool
) -> None:
    model = load(layout)
    [expected] = offline.generate(PROMPT, SAMPLED)
    name = {"llmapi": "sampling_param_exclude_input_from_output", "classic": "exclude_input_in_output"}[layout]
    inputs = {**SENT[layout], STREAM[layout]: streaming, name: False}
    assert text(list(ask(model, text_input=PROMPT, **inputs).sender)) == PROMPT + expected.outputs[0].text


def test_reasons_come_if_asked_for(load: Callable[..., Any]) -> None:
    model = load("llmapi")
    asked = {"return_finish_reason": True, "return_stop_reason": True}
    responses = list(ask(model, text_input=PROMPT, **SENT["llmapi"], streaming=True, **asked).sender)
    reasons = [(outputs(r)["finish_reason"], outputs(r)["stop_reason"]) for r in responses]
    assert reasons == [(b"", b"")] * (len(responses) - 1) + [(b"stop", b"")]


def test_many_requests_share_the_steps(load: Callable[..., Any], offline: LLM) -> None:
    model = load("llmapi")
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=40) for seed in range(8)]
    expected = offline.generate([PROMPT] * 8, params)
    steps = model.llm.get_metrics().steps
    inputs = {"text_input": PROMPT, "sampling_param_temperature": 0.7, "sampling_param_max_tokens": 40}
    requests = [ask(model, sampling_param_seed=seed, streaming=bool(seed % 2), **inputs) for seed in range(8)]
    assert [text(list(r.sender)) for r in requests] == [output.outputs[0].text for output in expected]
    tokens = sum(len(output.outputs[0].token_ids) for output in expected)
    assert model.llm.get_metrics().steps - steps < tokens / 4


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


def slow_down(engine: Any) -> None:
    """So that there is time to go away: a pause before each of its steps, longer than clients are looked for."""
    step = engine.llm.engine.step

    def slow() -> Any:
        time.sleep(0.15)
        return step()

    engine.llm.engine.step = slow


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


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


BAD = {
    "llmapi": [
        ({"sampling_param_best_of": 2}, "input sampling_param_best_of: one request is one sample"),
        ({"return_cumulative_logprob": True}, "input return_cumulative_logprob: log probabilities are not built"),
        ({"sampling_param_top_p": 1.5}, "top_p = 1.5 must be in"),
        ({"sampling_param_max_tokens": 0}, "max_tokens = 0 must be"),
        ({"sampling_param_seed": [1, 2]}, "input sampling_param_seed has 2 elements"),
        ({"text_input": [b"\xff"]}, "text_input is not UTF-8"),
        ({"text_input": ["a", "b"]}, "input text_input holds 2 prompts"),
        ({"text_input": "a" * 600}, "max_seq_len"),
    ],
    "classic": [
        ({"bad_words": ["b"]}, "input BAD_WORDS_DICT: forbidden words are not built"),
        ({"embedding_bias_words": ["b"]}, "input EMBEDDING_BIAS_WORDS: logit bias by words is not built"),
        ({"beam_width": 2}, "input beam_width: beam search is not built"),
        ({"return_log_probs": True}, "input return_log_probs: log probabilities are not built"),
        ({"return_context_logits": True}, "input return_context_logits: logits are not handed out"),
        ({"num_return_sequences": 2}, "input num_return_sequences: one request is one sample"),
        ({"temperature": -1.0}, "temperature = -1.0 must be"),
        ({"text_input": ""}, "input QUERY is empty"),
        ({"max_tokens": 0}, "max_tokens = 0 must be"),
    ],
}


@pytest.mark.parametrize(
    ("layout", "inputs", "message"), [(layout, *case) for layout, cases in BAD.items() for case in cases]
)
def test_a_bad_request_fails_alone(
    load: Callable[..., Any], offline: LLM, layout: str, inputs: dict[str, Any], message: str
) -> None:
    model = load(layout)
    good = ask(model, text_input=PROMPT, **SENT[layout])
    bad = ask(model, **{"text_input": PROMPT, **SENT[layout], **inputs})
    assert message in error(bad)
    assert text(list(good.sender)) == offline.generate(PROMPT, SAMPLED)[0].outputs[0].text


def test_parameters_that_are_no_inputs_are_refused(load: Callable[..., Any]) -> None:
    """Triton's generate calls make them of every field that is none."""
    model = load("llmapi")
    request = Request({"text_input": [PROMPT]}, parameters='{"max_tokens": 3}')
    model.execute([request])
    assert "max_tokens is no input of this model; inputs are text_input, streaming" in error(request)


def test_only_outputs_that_are_wanted_are_sent(load: Callable[..., Any]) -> None:
    for layout in SENT:
        model = load(layout)
        inputs = {name: [value] for name, value in {"text_input": PROMPT, **SENT[layout]}.items()}
        request = Request(inputs, outputs=["total_draft_tokens"])
        model.execute([request])
        [response] = request.sender
        assert set(outputs(response)) == {"total_draft_tokens"}


def test_what_asks_for_nothing_is_served(load: Callable[..., Any], offline: LLM) -> None:
    """Clients of TensorRT-LLM send these with every request."""
    neutral = {"beam_width": 1, "length_penalty": 1.0, "bad_words": [""], "return_log_probs": False}
    request = ask(load("classic"), text_input=PROMPT, **SENT["classic"], **neutral)
    assert text(list(request.sender)) == offline.generate(PROMPT, SAMPLED)[0].outputs[0].text


SAMPLING: dict[str, float] = {
    "temperature": 0.7, "top_k": 4, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.25, "max_tokens": 9,
    "seed": 11,
}  # fmt: skip


@pytest.mark.parametrize("model", [LlmApiModel, EngineModel])
def test_each_input_reaches_its_field_of_the_sampler(load: Callable[..., Any], model: Any) -> None:
    if model is LlmApiModel:
        wanted = SAMPLING
        sent: dict[str, Any] = {f"sampling_param_{name}": [value] for name, value in wanted.items()}
        job = load("llmapi").job({"text_input": ["a"], **sent})
    else:
        wanted = {**SAMPLING, "repetition_penalty": 1.25, "min_tokens": 2}
        tensors = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "max_tokens": "request_output_len"}
        sent = {tensors.get(name, name): [value] for name, value in wanted.items()}
        job = load("classic").models["tensorrt_llm"].job({"input_ids": [1], "input_lengths": [1], **sent})
    assert set(sent) == set(model._FIELDS)
    assert {name: getattr(job.params, name) for name in wanted} == wanted


def test_what_nvidias_client_sends_unasked_is_greedy(load: Callable[..., Any], offline: LLM) -> None:
    [expected] = offline.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    sent = {"max_tokens": 12, "temperature": 1.0, "top_k": 1, "top_p": 0.0, "repetition_penalty": 1.0}
    assert text(list(ask(load("classic"), text_input=PROMPT, **sent).sender)) == expected.outputs[0].text


def test_no_stream_where_a_request_is_answered_once(load: Callable[..., Any], offline: LLM) -> None:
    for layout in ("llmapi", "classic"):
        model = load(layout, decoupled=False)
        [response] = ask(model, text_input=PROMPT, **SENT[layout]).sender
        assert text([response]) == offline.generate(PROMPT, SAMPLED)[0].outputs[0].text
    assert "--no-streaming" in error(ask(model.models["tensorrt_llm"], **ENGINE_INPUTS, streaming=True))


ENGINE_INPUTS = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 12}


def test_the_engine_of_the_classic_layout_takes_ids(load: Callable[..., Any], offline: LLM) -> None:
    engine = load("classic").models["tensorrt_llm"]
    [expected] = offline.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=12))
    responses = list(ask(engine, **ENGINE_INPUTS, streaming=True).sender)
    ids: list[int] = []
    for response in responses:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        assert tensors["output_ids"].shape[:2] == (1, 1)
        ids += tensors["output_ids"][0, 0, : tensors["sequence_length"][0, 0]].tolist()
    assert ids == list(expected.outputs[0].token_ids)
    padded = ask(engine, **{**ENGINE_INPUTS, "input_ids": [1, 2, 3, 9, 9]})
    [response] = padded.sender
    assert outputs(response)["text_output"].decode() == expected.outputs[0].text
    assert "input_lengths = 4" in error(ask(engine, **{**ENGINE_INPUTS, "input_lengths": 4}))
    assert "draft_input_ids: drafts come from" in error(ask(engine, **ENGINE_INPUTS, draft_input_ids=[1]))


def test_end_id_takes_the_place_of_the_models_own(load: Callable[..., Any], offline: LLM) -> None:
    engine = load("classic").models["tensorrt_llm"]
    whole = offline.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    end = whole.token_ids[5]
    [response] = ask(engine, **ENGINE_INPUTS, end_id=int(end)).sender
    assert outputs(response)["sequence_length"] == whole.token_ids.index(end) + 1
    [response] = ask(engine, **ENGINE_INPUTS, end_id=-1).sender
    assert outputs(response)["sequence_length"] == 12


def test_postprocessing_reads_ids_where_there_is_no_text(load: Callable[..., Any], offline: LLM) -> None:
    post = load("classic").models["postprocessing"]
    made = offline.generate(PROMPT, SAMPLED)[0].outputs[0]
    ids = list(made.token_ids)
    inputs = {"TOKENS_BATCH": [[[*ids, 3]]], "SEQUENCE_LENGTH": [[len(ids)]]}
    [response] = post.execute([Request(inputs, outputs=["OUTPUT"])])
    assert response.output_tensors()[0].as_numpy().ravel()[0].decode() == made.text


@pytest.mark.parametrize("words", [[], [[5]], [[5, 6], [7]], [[1], [2], [3, 4, 5]]])
def test_stop_words_survive_their_packing(words: list[list[int]]) -> None:
    flat = packed_words(words)
    assert len(flat) % 2 == 0
    assert unpacked_words(flat) == words


def test_ends_of_words_out_of_order_are_refused() -> None:
    for flat in ([5, 6, 7, 2, 1, -1], [5, 6, 4, -1]):
        with pytest.raises(RequestError, match="stop_words_list"):
            unpacked_words(flat)
