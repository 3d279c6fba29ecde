"""The Triton models on real engines, with a double of the server: their inputs and their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from tests.e2e.tiny import EOS, PIECES
from tests.serve.pb_double import Request
from tests.serve.server import DEMO
from tests.serve.triton_models import (
    LIMITS,
    PROMPT,
    SAMPLED,
    SENT,
    STOP,
    STREAM,
    ask,
    both,
    error,
    layouts,
    make_model,
    outputs,
    plain,
    tensor,
    text,
)
from trtspec import LLM, SamplingParams
from trtspec.errors import RequestError
from trtspec.outputs import SpeculationStats
from trtspec.serve.triton.backend import LlmApiModel, Part
from trtspec.serve.triton.classic import EngineModel, packed_words, unpacked_words
from trtspec.serve.triton.fields import stop_fields
from trtspec.text import Tokenizer

target = pytest.fixture(scope="module")(make_model)
offline = pytest.fixture(scope="module")(plain)
fresh = pytest.fixture(layouts)


@pytest.fixture(scope="module")
def load(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`fresh`, but a model serves all tests that ask for it."""
    yield from layouts(target, tmp_path_factory.mktemp("repositories"))


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
    # The step of the prompt returns one token, each later step at least one.
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
    assert (
        text(list(ask(model, text_input=PROMPT, **SENT[layout], **{STOP[layout]: [""]}).sender))
        == whole.outputs[0].text
    )


@pytest.fixture(scope="module")
def special(target: Path, offline: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The model with a changed tokenizer, and the id of the token that the tokenizer makes special.

    The tokenizer begins each prompt with </s>. Text of SAMPLED contains the special token.
    """
    assert offline.tokenizer is not None
    ids = [EOS, *offline.tokenizer.encode(PROMPT)]
    [output] = offline.generate([ids], SAMPLED)
    token = next(token for token in output.outputs[0].token_ids[2:] if PIECES[token] not in PROMPT)
    folder = copytree(target, tmp_path_factory.mktemp("special") / "target")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([PIECES[token]])
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", EOS)])
    backend.save(str(folder / "tokenizer.json"))
    return folder, token


@both
def test_a_special_token_is_a_stop_word(load: Callable[..., Any], special: tuple[Path, int], layout: str) -> None:
    """A special token is a stop word although no text shows it."""
    folder, token = special
    model = load(layout, checkpoint=folder)
    with LLM(folder, **LIMITS) as llm:
        [whole] = llm.generate(PROMPT, SAMPLED)
        [expected] = llm.generate(PROMPT, dataclasses.replace(SAMPLED, stop_token_ids=[token]))
    asked = {"text_input": PROMPT, **SENT[layout]}
    reasons = {"return_stop_reason": True} if layout == "llmapi" else {}
    [response] = ask(model, **asked, **reasons, **{STOP[layout]: ["zz", PIECES[token]]}).sender
    assert outputs(response)["text_output"].decode() == expected.outputs[0].text != whole.outputs[0].text
    if layout == "llmapi":
        assert outputs(response)["stop_reason"].decode() == PIECES[token]
    mixed = ask(model, **asked, **{STOP[layout]: ["a" + PIECES[token]]})
    assert "mixes a special token, or a part of a character, with others; give that one alone" in error(mixed)


def test_a_special_token_stops_next_to_an_end_id(load: Callable[..., Any]) -> None:
    engine = load("classic").models["tensorrt_llm"]
    inputs = {"input_ids": [1], "input_lengths": [1], "request_output_len": [9], "stop_words_list": [EOS, 1]}
    assert engine.job({**inputs, "end_id": [7]}).params.stop_token_ids == (EOS, 7)


@both
def test_what_the_tokenizer_puts_before_a_prompt_is_not_shown(
    load: Callable[..., Any], special: tuple[Path, int], layout: str
) -> None:
    name = {"llmapi": "sampling_param_exclude_input_from_output", "classic": "exclude_input_in_output"}[layout]
    request = ask(load(layout, checkpoint=special[0]), text_input=PROMPT, **SENT[layout], **{name: False})
    assert text(list(request.sender)).startswith(PROMPT)


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


ASKS_LOGPROBS = {"llmapi": "return_cumulative_logprob", "classic": "return_log_probs"}
CUMULATIVE = {"llmapi": "cumulative_logprob", "classic": "cum_log_probs"}


@both
@pytest.mark.parametrize("streaming", [False, True])
def test_logprobs_are_those_of_plain_decoding(
    load: Callable[..., Any], offline: LLM, layout: str, streaming: bool
) -> None:
    """Logprobs are those of the tokens drawn, and the sum is that of all tokens so far.

    A prompt that comes first has no logprobs.
    """
    whole = offline.generate(PROMPT, dataclasses.replace(SAMPLED, logprobs=0))[0].outputs[0]
    assert whole.logprobs is not None
    own = [entry[token].logprob for token, entry in zip(whole.token_ids, whole.logprobs, strict=True)]
    echo = {"llmapi": "sampling_param_exclude_input_from_output", "classic": "exclude_input_in_output"}[layout]
    asked = {**SENT[layout], STREAM[layout]: streaming, ASKS_LOGPROBS[layout]: True, echo: False}
    responses = list(ask(load(layout), text_input=PROMPT, **asked).sender)
    assert (len(responses) > 1) == streaming
    sums = [tensor(response, CUMULATIVE[layout]) for response in responses]
    assert {one.shape for one in sums} == {(1,) if layout == "llmapi" else (1, 1)}
    so_far = np.cumsum(own)  # each token lowers it, so a sum determines the number of tokens
    counts = [int(np.abs(so_far - one.item()).argmin()) + 1 for one in sums]
    assert np.ravel(sums) == pytest.approx([so_far[count - 1] for count in counts], rel=1e-6)
    assert counts == sorted(set(counts))
    assert counts[-1] == len(own)
    if layout == "classic":
        parts = [tensor(response, "output_log_probs") for response in responses]
        assert [one.shape for one in parts] == [(1, 1, count) for count in np.diff([0, *counts])]
        assert np.concatenate(parts, axis=2).ravel() == pytest.approx(own, rel=1e-6)


@both
def test_no_logprobs_unasked(load: Callable[..., Any], layout: str) -> None:
    model = load(layout)
    for more in ({}, {ASKS_LOGPROBS[layout]: False}):
        [response] = ask(model, text_input=PROMPT, **SENT[layout], **more).sender
        assert not {CUMULATIVE[layout], "output_log_probs"} & set(outputs(response))


def test_a_step_without_tokens_has_a_logprob_all_the_same(load: Callable[..., Any]) -> None:
    """A step without tokens has a logprob, because the server refuses tensors without elements.

    sequence_length says that there is no token.
    """
    engine = load("classic").models["tensorrt_llm"]
    job = engine.job({"input_ids": [1], "input_lengths": [1], "request_output_len": [9], "return_log_probs": [True]})
    values = engine.outputs(job, Part("", (), "abort", None, SpeculationStats(), (), -1.5))
    assert (values["sequence_length"], values["output_log_probs"], values["cum_log_probs"]) == ([0], [0.0], [-1.5])


def test_many_requests_share_the_steps(fresh: Callable[..., Any], offline: LLM) -> None:
    model = fresh("llmapi")
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=40) for seed in range(8)]
    expected = offline.generate([PROMPT] * 8, params)
    inputs = {"text_input": PROMPT, "sampling_param_temperature": 0.7, "sampling_param_max_tokens": 40}
    requests = [ask(model, sampling_param_seed=seed, streaming=bool(seed % 2), **inputs) for seed in range(8)]
    assert [text(list(r.sender)) for r in requests] == [output.outputs[0].text for output in expected]
    metrics = model.llm.get_metrics()
    assert metrics.steps < metrics.speculation.steps / 2  # the second counts a step for each request in it


BAD = {
    "llmapi": [
        ({"sampling_param_best_of": 2}, "input sampling_param_best_of: one request is one sample"),
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
    """Parameters that are no inputs are refused; Triton's generate calls make one of every field that is no input."""
    model = load("llmapi")
    request = Request({"text_input": [PROMPT]}, parameters='{"max_tokens": 3}')
    model.execute([request])
    assert "max_tokens is no input of this model; inputs are text_input, streaming" in error(request)
    request = Request({"text_input": [PROMPT]}, parameters='{"sampling-param-top-k": 3}')
    model.execute([request])
    assert "sampling-param-top-k is no input" in error(request)
    headers = '{"x-request-id": "1", "Traceparent": "00-1"}'
    request = Request({"text_input": [PROMPT]}, parameters=headers, outputs=["text_output"])
    model.execute([request])  # headers that the server forwards
    assert text(list(request.sender))


def test_only_outputs_that_are_wanted_are_sent(load: Callable[..., Any]) -> None:
    for layout in SENT:
        model = load(layout)
        inputs = {name: [value] for name, value in {"text_input": PROMPT, **SENT[layout]}.items()}
        request = Request(inputs, outputs=["total_draft_tokens"])
        model.execute([request])
        [response] = request.sender
        assert set(outputs(response)) == {"total_draft_tokens"}


def test_what_asks_for_nothing_is_served(load: Callable[..., Any], offline: LLM) -> None:
    """Inputs with neutral values are served; clients of TensorRT-LLM send them with every request."""
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


def test_a_token_that_is_a_part_of_a_character_is_a_stop_word() -> None:
    tokenizer = Tokenizer.from_folder(DEMO / "target")
    assert tokenizer is not None
    ids = tokenizer.encode("\u2603")
    assert len(ids) > 1
    words = [(tokenizer.decode(some, False), some) for some in (ids, ids[:1], ids[:2])]
    assert stop_fields(tokenizer, words[:2]) == {"stop": ["\u2603"], "stop_token_ids": ids[:1]}
    with pytest.raises(RequestError, match="mixes a special token, or a part of a character"):
        stop_fields(tokenizer, words[2:])


def test_ends_of_words_out_of_order_are_refused() -> None:
    for flat in ([5, 6, 7, 2, 1, -1], [5, 6, 4, -1]):
        with pytest.raises(RequestError, match="stop_words_list"):
            unpacked_words(flat)
