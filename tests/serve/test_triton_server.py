"""Both layouts in a real tritonserver, with the demo models: over HTTP, gRPC and gRPC streams.

make test-triton runs all of it. make test runs it with fewer servers, prompts and clients (TRTSPEC_TRITON_SHORT=1), as
each server takes ten seconds to start and stop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serve.triton_server import GrpcStream, TritonServer, grpc_inputs, home
from trtspec import LLM, SamplingParams
from trtspec.outputs import CompletionOutput
from trtspec.serve.triton.configs import LAYOUTS, ModelSpec, config_text
from trtspec.serve.triton.repo import write_repository

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(home() is None, reason="no tritonserver here; tests/contract/run_triton.py gets one"),
]
SHORT = os.environ.get("TRTSPEC_TRITON_SHORT") == "1"
in_long_form = pytest.mark.skipif(SHORT, reason="in the long form alone: make test-triton")

DEMO = Path(__file__).parents[2] / "examples" / "demo"
SPECULATION = {
    "eagle3": {"method": "eagle3", "model": str(DEMO / "eagle3"), "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
}
LIMITS: dict[str, Any] = {"max_batch_size": 32, "max_seq_len": 1024, "num_kv_blocks": 1500}
PROMPTS = ["def quicksort(", "class Node:\n    ", "import os\nimport sys\n\n", "# naïve Ünïcödé → ☃\ndef f(", "x = ["]
CASE_PROMPTS = [PROMPTS[0], PROMPTS[3]] if SHORT else PROMPTS
NUM_CLIENTS = 16 if SHORT else 32
SERVERS = [("llmapi", "eagle3"), *([] if SHORT else [("llmapi", "ngram")]), ("classic", "eagle3")]
SERVER_OPTIONS = ["--disable-auto-complete-config"] if SHORT else []
"""Without this option the server loads each model twice.

The first time, it asks for fields that config.pbtxt leaves out; here there are none.
"""
MODELS = {"llmapi": ["tensorrt_llm"], "classic": ["ensemble", "tensorrt_llm_bls"]}
"""Models that clients call, by layout."""
LLMAPI_NAMES = {
    "max_tokens": "sampling_param_max_tokens",
    "temperature": "sampling_param_temperature",
    "seed": "sampling_param_seed",
    "stop_words": "sampling_param_stop",
    "stream": "streaming",
}

CASES = [
    (prompt, params)
    for i, prompt in enumerate(CASE_PROMPTS)
    for params in (
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=0.8, seed=i, max_tokens=40),
        SamplingParams(temperature=0.8, seed=i + 100, max_tokens=40, stop=["\n", "el"]),
    )
]


Case = tuple[str, SamplingParams]


def asked(model: str, case: Case, stream: bool = False) -> dict[str, Any]:
    """Return a request as JSON, with the layout's field names."""
    prompt, params = case
    body: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature, "seed": params.seed}
    body = {name: value for name, value in body.items() if value is not None}
    body.update({"stop_words": list(params.stop)} if params.stop else {}, **({"stream": True} if stream else {}))
    names = LLMAPI_NAMES if model == "tensorrt_llm" else {}
    return {"text_input": prompt, **{names.get(name, name): value for name, value in body.items()}}


def many_cases() -> list[Case]:
    """Return one case for each of many clients."""
    return [
        (PROMPTS[i % len(PROMPTS)], SamplingParams(temperature=0.8, seed=i, max_tokens=64)) for i in range(NUM_CLIENTS)
    ]


LONG: Case = (PROMPTS[1], SamplingParams(temperature=0.8, seed=3, max_tokens=900))


@pytest.fixture(scope="module")
def offline() -> dict[Case, CompletionOutput]:
    """Output of plain decoding for each case."""
    cases = [*CASES, *many_cases(), LONG]
    with LLM(DEMO / "target", **LIMITS) as llm:
        outputs = llm.generate([prompt for prompt, _ in cases], [params for _, params in cases], use_tqdm=False)
    return {case: output.outputs[0] for case, output in zip(cases, outputs, strict=True)}


def served(folder: Path, layout: str, speculation: str, streaming: bool) -> TritonServer:
    repository = folder / "repository"
    write_repository(
        repository, DEMO / "target", SPECULATION[speculation], layout=layout, streaming=streaming, **LIMITS
    )
    return TritonServer(repository, MODELS[layout], SERVER_OPTIONS)


@pytest.fixture(scope="module", params=SERVERS, ids="-".join)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A streaming server. pytest runs all tests of one server before those of the next."""
    with served(tmp_path_factory.mktemp("triton"), *request.param, streaming=True) as server:
        yield server


@pytest.fixture(scope="module", params=["llmapi"] if SHORT else ["llmapi", "classic"])
def unary_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server that answers each request once."""
    with served(tmp_path_factory.mktemp("triton"), request.param, "ngram", streaming=False) as server:
        yield server


def test_http(server: TritonServer, offline: dict[Case, CompletionOutput]) -> None:
    for model in server.models:
        for case in CASES:
            answer = server.post(f"{model}/generate", asked(model, case))
            assert answer["text_output"] == offline[case].text, answer
    figures = server.settled()
    assert 0 < figures["trtspec_accepted_draft_tokens_total"] < figures["trtspec_draft_tokens_total"]


@in_long_form
def test_http_stream(server: TritonServer, offline: dict[Case, CompletionOutput]) -> None:
    """A stream has one response for each step of the engine, which has no other work."""
    for model in server.models:
        before, num_events = server.settled(), 0
        for case in CASES:
            events = list(server.stream(f"{model}/generate_stream", asked(model, case, stream=True)))
            assert "".join(event["text_output"] for event in events) == offline[case].text
            num_events += len(events)
        assert num_events == server.settled()["trtspec_steps_total"] - before["trtspec_steps_total"]


def test_grpc_stream(server: TritonServer, offline: dict[Case, CompletionOutput]) -> None:
    """A stream has one response for each step, and the final flag once, at the end."""
    for model in server.models:
        before, num_texts = server.settled(), 0
        with GrpcStream(server) as stream:
            for case in CASES:
                stream.send(model, asked(model, case, stream=True))
                messages = list(stream)
                texts = [message.text for message in messages if message.text is not None]
                assert "".join(texts) == offline[case].text
                assert [message.final for message in messages] == [False] * (len(messages) - 1) + [True]
                num_texts += len(texts)
            assert num_texts == server.settled()["trtspec_steps_total"] - before["trtspec_steps_total"]
            for case in CASES:
                stream.send(model, asked(model, case))
                [whole, *end] = list(stream)
                assert whole.text == offline[case].text
                assert all(message.text is None for message in end)


def test_a_cancelled_stream_frees_its_request(server: TritonServer, offline: dict[Case, CompletionOutput]) -> None:
    assert len(offline[LONG].token_ids) == 900
    for model in server.models:
        before = server.settled()
        with GrpcStream(server) as stream:
            stream.send(model, asked(model, LONG, stream=True))
            first = [next(stream) for _ in range(3)]
            assert "".join(message.text or "" for message in first) == offline[LONG].text[: sum(map(len, first))]
            while not server.figures()["trtspec_kv_blocks_in_use"]:
                time.sleep(0.02)
            stream.cancel()
        after = server.settled()
        assert after["trtspec_kv_blocks_in_use"] == 0
        # Triton does not tell the models inside an ensemble that its client has left. Such a request runs to its end.
        tokens = after["trtspec_output_tokens_total"] - before["trtspec_output_tokens_total"]
        assert (tokens == 900) if model == "ensemble" else (tokens < 600)


def test_many_clients_are_batched(server: TritonServer, offline: dict[Case, CompletionOutput]) -> None:
    for model in server.models:
        before = server.settled()
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            bodies = [asked(model, case) for case in many_cases()]
            answers = list(clients.map(server.post, [f"{model}/generate"] * NUM_CLIENTS, bodies))
        assert [answer["text_output"] for answer in answers] == [offline[case].text for case in many_cases()]
        after = server.settled()
        steps = after["trtspec_steps_total"] - before["trtspec_steps_total"]
        tokens = after["trtspec_output_tokens_total"] - before["trtspec_output_tokens_total"]
        print(f"{model}: {NUM_CLIENTS} clients, {tokens:.0f} tokens in {steps:.0f} steps, {tokens / steps:.1f} a step")
        assert tokens == sum(len(offline[case].token_ids) for case in many_cases())
        assert steps < tokens / 8


@in_long_form
def test_logprobs(server: TritonServer) -> None:
    """Logprobs come in one response or in many, and not if they are not requested, which an ensemble must accept."""
    prompt, params = CASES[1]
    with LLM(DEMO / "target", **LIMITS) as llm:
        whole = llm.generate(prompt, replace(params, logprobs=0), use_tqdm=False)[0].outputs[0]
    assert whole.logprobs is not None
    own = [entry[token].logprob for token, entry in zip(whole.token_ids, whole.logprobs, strict=True)]
    for model in server.models:
        name, total = ("cumulative_logprob",) * 2 if model == "tensorrt_llm" else ("log_probs", "cum_log_probs")
        more = {f"return_{name}": True}
        answer = server.post(f"{model}/generate", {**asked(model, CASES[1]), **more})
        assert answer[total] == pytest.approx(sum(own), rel=1e-4)
        events = list(server.stream(f"{model}/generate_stream", {**asked(model, CASES[1], stream=True), **more}))
        assert len(events) > 1
        assert events[-1][total] == answer[total]
        if model != "tensorrt_llm":
            assert answer["output_log_probs"] == pytest.approx(own, abs=1e-4)
            parts = [event["output_log_probs"] for event in events]  # a list of one element comes as a number
            flat = [one for part in parts for one in (part if isinstance(part, list) else [part])]
            assert flat == pytest.approx(own, abs=1e-4)
        assert total not in server.post(f"{model}/generate", asked(model, CASES[1]))


@in_long_form
def test_an_error_concerns_its_request_alone(server: TritonServer, offline: dict[Case, CompletionOutput]) -> None:
    bad = {
        "llmapi": [("sampling_param_best_of", 2), ("sampling_param_top_p", 7.0)],
        "classic": [("bad_words", ["x"]), ("beam_width", 3), ("return_context_logits", True), ("top_p", 7.0)],
    }
    for model in server.models:
        with GrpcStream(server) as good:
            good.send(model, asked(model, LONG, stream=True))
            for name, value in bad["llmapi" if model == "tensorrt_llm" else "classic"]:
                answer = server.post(f"{model}/generate", {**asked(model, CASES[0]), name: value})
                assert name.removeprefix("sampling_param_").lower() in answer["error"].lower(), answer
            answer = server.post(f"{model}/generate", {**asked(model, CASES[0]), "nonsense": 1})
            assert "nonsense is no input" in answer["error"], answer
            assert "".join(message.text or "" for message in good) == offline[LONG].text


def test_stop_ends_the_request_of_the_same_id(server: TritonServer) -> None:
    if server.models != ["tensorrt_llm"]:
        pytest.skip("of the models that clients call here, none takes stop")
    with GrpcStream(server) as stream, GrpcStream(server) as other:
        body = {**asked("tensorrt_llm", LONG, stream=True), "return_finish_reason": True}
        stream.send("tensorrt_llm", body, "mine")
        assert next(stream).finish_reason == ""
        other.send("tensorrt_llm", {"text_input": "", "stop": True}, "mine")
        assert [message.error for message in other] == [None]
        assert list(stream)[-1].finish_reason == "abort"


def test_calls_that_return_one_response(unary_server: TritonServer, offline: dict[Case, CompletionOutput]) -> None:
    """HTTP and gRPC infer return one response; Triton refuses them for models that stream."""
    import tritonclient.grpc

    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{unary_server.grpc}") as client:
        for model in unary_server.models:
            for case in CASES:
                result = client.infer(model, grpc_inputs(model, asked(model, case)))
                assert result.as_numpy("text_output").ravel()[0].decode() == offline[case].text
                assert result.as_numpy("total_draft_tokens").size == 1
            answer = unary_server.post(f"{model}/generate", asked(model, CASES[0]))
            assert answer["text_output"] == offline[CASES[0]].text
            answer = unary_server.post(f"{model}/generate", asked(model, CASES[0], stream=True))
            assert "--no-streaming" in answer["error"]


@in_long_form
def test_many_unary_clients_are_batched(unary_server: TritonServer, offline: dict[Case, CompletionOutput]) -> None:
    test_many_clients_are_batched(unary_server, offline)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("spec", [spec for specs in LAYOUTS.values() for spec in specs], ids=lambda spec: spec.name)
def test_config_is_a_model_config(spec: ModelSpec, streaming: bool) -> None:
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

    parameters = {"tokenizer_dir": '/a "quoted"\\folder/ü'}
    config = text_format.Parse(config_text(spec, streaming, parameters), ModelConfig())
    assert (config.name, config.max_batch_size) == (spec.name, spec.max_batch_size)
    assert config.parameters["tokenizer_dir"].string_value == parameters["tokenizer_dir"]
    assert config.model_transaction_policy.decoupled == (spec.decoupled and streaming and not spec.steps)
    for tensors, specs in ((config.input, spec.inputs), (config.output, spec.outputs)):
        assert [(t.name, DataType.Name(t.data_type), tuple(t.dims)) for t in tensors] == [
            (s.name, f"TYPE_{s.dtype}", s.dims) for s in specs
        ]
    assert [t.optional for t in config.input] == [s.optional for s in spec.inputs]
    known = {model.name: model for model in LAYOUTS["classic"]}
    for step in config.ensemble_scheduling.step:
        assert set(step.input_map) <= {tensor.name for tensor in known[step.model_name].inputs}
        assert set(step.output_map) <= {tensor.name for tensor in known[step.model_name].outputs}
