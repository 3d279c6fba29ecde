"""Sampling parameters: every refusal, every default, and the source of each default."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.errors import RequestError
from trtspec.sampling_params import NEVER, RequestSampling, SamplingParams, StructuredOutputs, sample_seed


def sampling_of(
    params: SamplingParams,
    defaults: dict[str, float | int] | None = None,
    *,
    seed: int = 7,
    prompt_len: int = 10,
    stop_ids: tuple[int, ...] = (),
) -> RequestSampling:
    return RequestSampling.of(params, seed, prompt_len, stop_ids, defaults or {})


# --- validation -------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
REFUSED: dict[str, list[Any]] = {
    "n": [0, -1, 1.0, "2", True, None],
    "temperature": [-0.1, -1, NAN, INF, -INF, 10**400, "1", True, [1.0]],
    "top_k": [-2, 2**31, 1.5, "3", True],
    "top_p": [0, 0.0, -0.5, 1.0001, 2, NAN, INF, "0.9", True],
    "min_p": [-0.1, 1.1, NAN, "0", False],
    "seed": [2**64, -(2**63) - 1, 1.0, "1", True],
    "max_tokens": [0, -5, 1.5, "16", True],
    "min_tokens": [-1, 0.0, None, False],
    "stop": [5, "", [""], ["ok", ""], [b"x"], [1]],
    "stop_token_ids": [5, [-1], [1.0], ["1"], [True], [None]],
    "repetition_penalty": [0, 0.0, -1.0, NAN, INF, "1", True],
    "presence_penalty": [None, -2.01, 2.01, NAN, INF, "1", True],
    "frequency_penalty": [None, -2.01, 2.01, NAN, INF, "1", True],
    "logit_bias": [[1], 1, {-1: 1.0}, {1.0: 1.0}, {"1": 1.0}, {True: 1.0}, {1: 100.5}, {1: -101}, {1: NAN}, {1: None}],
    "logprobs": [-1, 21, 1.0, "1", True],
    "max_draft_len": [-1, 1.0, "1", False],
}
ALLOWED: dict[str, list[Any]] = {
    "n": [1, 64],
    "temperature": [None, 0, 0.0, 1e-8, 1, 2.5],
    "top_k": [None, -1, 0, 1, 2**31 - 1],
    "top_p": [None, 1e-9, 0.5, 1, 1.0],
    "min_p": [None, 0, 0.0, 0.05, 1],
    "seed": [None, 0, -1, 2**63, 2**64 - 1, -(2**63)],
    "max_tokens": [None, 1, 10**6],
    "min_tokens": [0, 1, 16],
    "stop": [(), "end", ["a", "b"], ("a",)],
    "stop_token_ids": [(), [0], (5, 6)],
    "repetition_penalty": [None, 1e-3, 1, 1.0, 1.2, 3],
    "presence_penalty": [-2, 0, 2, 1.5],
    "frequency_penalty": [-2, 0, 2, 1.5],
    "logit_bias": [None, {}, {0: -100, 7: 100.0}],
    "logprobs": [None, 0, 20],
    "max_draft_len": [None, 0, 1, 1000],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r:.40}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(ALLOWED))
def test_allowed(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value", "words"), [
    ("temperature", -0.5, "temperature = -0.5 must be >= 0 (0 = greedy)"),
    ("top_p", 1.5, "top_p = 1.5 must be in (0, 1] (1 = off)"),
    ("min_p", 2, "min_p = 2 must be in [0, 1] (0 = off)"),
    ("n", 0, "n = 0 must be an integer >= 1"),
])  # fmt: skip
def test_an_error_names_field_value_and_range(name: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == words


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(RequestError, match="min_tokens = 17 exceeds max_tokens = 16"):
        SamplingParams(min_tokens=17)
    assert SamplingParams(min_tokens=17, max_tokens=None).min_tokens == 17
    with pytest.raises(RequestError, match=f"min_tokens = {2**31} must be an integer <= {2**31 - 1}"):
        SamplingParams(min_tokens=2**31, max_tokens=None)


def test_stop_strings_have_a_limit() -> None:
    """Text that may begin a stop string is held back, and compared with the string for each token."""
    assert SamplingParams(stop=["a", "b" * 1024]).stop
    with pytest.raises(RequestError, match="a stop string has 1025 characters; use 1024 at most"):
        SamplingParams(stop=["a", "b" * 1025])


def test_values_that_mean_none_in_vllm() -> None:
    assert SamplingParams(seed=-1, stop=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]


def test_a_tiny_temperature_does_not_divide_to_infinity() -> None:
    for temperature in (5e-324, 1e-40, 1e-7):
        sampling = sampling_of(SamplingParams(temperature=temperature))
        assert (sampling.greedy, sampling.temperature) == (False, 1e-6)
    assert sampling_of(SamplingParams(temperature=1e-5)).temperature == 1e-5


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="end", detokenize=False)
    assert not SamplingParams(stop_token_ids=[1], detokenize=False).detokenize


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, .*; this has none"),
        ({"json": "{}", "regex": "a"}, "exactly one of .*; this has json and regex"),
        ({"json": {"a": {1}}}, "the schema is no JSON"),
        ({"json": 3}, "json = 3 must be text"),
        ({"regex": b"a"}, "regex = b'a' must be text"),
        ({"choice": "yes"}, "choice = 'yes' must be a list"),
        ({"choice": []}, r"choice = \(\) must be non-empty strings"),
        ({"choice": ["a", ""]}, "must be non-empty strings"),
        ({"grammar": 1}, "grammar = 1 must be text"),
        ({"json": '{"items":' * 65 + "{}" + "}" * 65}, "nested deeper than 64 levels"),
    ],
)
def test_structured_outputs_are_of_one_form(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputs(**fields)


def test_brackets_in_strings_are_no_nesting() -> None:
    text = '{"const": "' + "[{" * 100 + r"\"{" + '"}'
    assert StructuredOutputs(json=text).json == text


def test_a_string_that_is_never_closed_is_read_once() -> None:
    start = time.perf_counter()
    StructuredOutputs(json='"' + r"\"" * 60_000)  # a search that began again at each quote would take a minute
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("fields", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_what_contradicts_structured_outputs_is_refused(fields: dict[str, Any]) -> None:
    form = StructuredOutputs(json={"type": "object"})
    assert form.json == '{"type": "object"}'
    with pytest.raises(RequestError, match="structured_outputs says where the text ends; leave min_tokens and ignore"):
        SamplingParams(structured_outputs=form, **fields)
    with pytest.raises(RequestError, match="structured_outputs = 'json' must be a StructuredOutputs"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]


def test_unknown_and_positional_arguments_are_errors() -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]


def test_values_are_frozen_and_sequences_copied() -> None:
    stops, ids, bias = ["a"], [1], {3: 1.0}
    params = SamplingParams(stop=stops, stop_token_ids=ids, logit_bias=bias)
    stops.append("b")
    ids.append(2)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    assert params.stop == ("a",)
    assert params.stop_token_ids == (1,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


# --- where defaults come from -----------------------------------------------------------------------------------------


def test_nothing_said_anywhere() -> None:
    sampling = sampling_of(SamplingParams())
    assert sampling == RequestSampling(
        greedy=False, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, ban_ids=(), ban_until=10
    )


CHECKPOINT = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}


def test_the_checkpoint_fills_in_what_is_unset() -> None:
    sampling = sampling_of(SamplingParams(), CHECKPOINT)
    assert {field: getattr(sampling, field) for field in CHECKPOINT} == CHECKPOINT


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1.3), ("top_k", 5), ("top_p", 0.5), ("min_p", 0.2), ("repetition_penalty", 1.0)],
)
def test_the_caller_wins_over_the_checkpoint_field_by_field(name: str, value: float) -> None:
    sampling = sampling_of(SamplingParams(**{name: value}), CHECKPOINT)
    assert {field: getattr(sampling, field) for field in CHECKPOINT} == {**CHECKPOINT, name: value}


@pytest.mark.parametrize(("name", "off"), [("top_k", 0), ("top_k", -1), ("top_p", 1.0), ("min_p", 0.0)])
def test_off_is_not_unset(name: str, off: float) -> None:
    sampling = sampling_of(SamplingParams(**{name: off}), CHECKPOINT)
    assert getattr(sampling, name) == max(off, 0)


@pytest.mark.parametrize("temperature", [0, 0.0])
def test_temperature_zero_is_greedy(temperature: float) -> None:
    assert sampling_of(SamplingParams(temperature=temperature), CHECKPOINT).greedy


def test_a_tiny_temperature_is_not_greedy() -> None:
    assert not sampling_of(SamplingParams(temperature=1e-6)).greedy


def test_a_checkpoint_may_make_unset_greedy() -> None:
    assert sampling_of(SamplingParams(), {"temperature": 0}).greedy
    assert not sampling_of(SamplingParams(temperature=1.0), {"temperature": 0}).greedy


def test_min_tokens_bans_the_stop_ids_until_the_index_of_the_first_free_token() -> None:
    sampling = sampling_of(SamplingParams(min_tokens=3), prompt_len=10, stop_ids=(9, 2))
    assert sampling.ban_ids == (2, 9)
    assert sampling.ban_until == 13  # indices 10, 11 and 12 are the first three tokens


def test_without_min_tokens_nothing_is_banned() -> None:
    assert sampling_of(SamplingParams(), stop_ids=(9, 2)).ban_ids == ()


@pytest.mark.parametrize(
    ("fields", "penalised"),
    [
        ({}, False),
        ({"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {1: 2.0}}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
    ],
)
def test_penalties_that_are_off_are_none(fields: dict[str, Any], penalised: bool) -> None:
    assert sampling_of(SamplingParams(**fields)).is_penalised is penalised


def test_never_is_beyond_every_token_index() -> None:
    assert 2**40 < NEVER < 2**63


# --- TensorRT-LLM's defaults ------------------------------------------------------------------------------------------


OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 1},
        {"top_k": 1, "top_p": 0.0},  # what its client sends by default
        {"top_k": 1, "temperature": 0.7},
        {"top_p": 0.0, "top_k": 40},
        {"top_p": -0.5},
        {"temperature": 0.0, "top_k": 3},
        {"max_tokens": None, "repetition_penalty": 1.0},
        {"temperature": None, "top_k": None, "top_p": None},
    ],
    ids=str,
)
def test_tensorrt_llm_is_greedy(fields: dict[str, Any]) -> None:
    max_tokens = fields.get("max_tokens", 5)
    params = SamplingParams.tensorrt_llm(**{"max_tokens": 5, "seed": 3, **fields})
    assert params == SamplingParams(max_tokens=max_tokens, seed=3, **{**OFF, "temperature": 0.0})
    assert sampling_of(params, CHECKPOINT).greedy


@pytest.mark.parametrize("fields", [{"top_k": 40}, {"top_p": 0.9}, {"top_k": 0}, {"top_p": 1.0, "temperature": None}])
def test_tensorrt_llm_samples_at_one_when_a_filter_is_set(fields: dict[str, Any]) -> None:
    assert SamplingParams.tensorrt_llm(**fields) == SamplingParams(**{**OFF, **fields, "temperature": 1.0})


def test_tensorrt_llm_keeps_a_temperature() -> None:
    assert SamplingParams.tensorrt_llm(temperature=0.3, top_k=3) == SamplingParams(
        **{**OFF, "temperature": 0.3, "top_k": 3}
    )


@pytest.mark.parametrize("fields", [{"temperature": 0.3}, {"top_p": 0.9}, {"top_k": 7, "repetition_penalty": 1.2}])
def test_tensorrt_llm_does_not_ask_the_checkpoint(fields: dict[str, Any]) -> None:
    sampling = sampling_of(SamplingParams.tensorrt_llm(**fields), CHECKPOINT)
    assert {name: getattr(sampling, name) for name in OFF} == {**OFF, **fields}
    assert sampling.is_penalised is ("repetition_penalty" in fields)


@pytest.mark.parametrize("fields", [{"top_k": 1, "temperature": -1.0}, {"top_p": NAN}, {"top_p": "0"}, {"top_k": -2}])
def test_tensorrt_llm_refuses_what_nobody_can_mean(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        SamplingParams.tensorrt_llm(**fields)


# --- seeds ------------------------------------------------------------------------------------------------------------

any_seed = st.integers(-(2**63), 2**64 - 1)


@given(seed=any_seed)
def test_sample_zero_uses_the_seed_itself(seed: int) -> None:
    assert (sample_seed(seed, 0) - seed) % 2**64 == 0


@given(seed=any_seed, index=st.integers(0, 10**6))
def test_seeds_fit_a_signed_64_bit_tensor(seed: int, index: int) -> None:
    assert -(2**63) <= sample_seed(seed, index) < 2**63


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 100))
def test_signed_and_unsigned_spellings_are_the_same_seed(seed: int, index: int) -> None:
    signed = seed - 2**64 if seed >= 2**63 else seed
    assert sample_seed(seed, index) == sample_seed(signed, index)


def test_other_samples_use_splitmix64() -> None:
    """Seeds of other samples are the first outputs of the reference implementation (Vigna), here for state 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [sample_seed(1234567, i) % 2**64 for i in (1, 2, 3)] == expected


def test_seeds_of_neighbouring_requests_and_samples_differ() -> None:
    drawn = {sample_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(drawn) == 100 * 100
