"""Requests, speculation, options and text without a tokenizer that LLM refuses.

Each error says what to do, and leaves LLM working.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e import api_cases
from tests.e2e.api_cases import GREEDY, NGRAM, copy_of, one
from tests.e2e.tiny import VOCAB, assert_all_blocks_free, make_target
from trtspec import LLM, SamplingParams
from trtspec.errors import CapacityError, CheckpointError, ConfigError, RequestError, TrtSpecError, UnsupportedError

llm = api_cases.llm
greedy_ids = api_cases.greedy_ids


# -- a folder without a tokenizer ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mute(target: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = copy_of(target, tmp_path_factory.mktemp("mute") / "model")
    (folder / "tokenizer.json").unlink()
    return LLM(folder)


def test_without_a_tokenizer_ids_work(mute: LLM, greedy_ids: list[int]) -> None:
    output = one(mute, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert (output.text, output.token_ids) == ("", greedy_ids)


def test_switches_may_be_numbers_and_nothing_is_asked_for_by_what_is_empty(target: Path) -> None:
    with LLM(target, tokenizer="", enable_prefix_caching=0, debug=None, seed=np.int64(3)) as llm:
        assert (llm.engine.loop.scheduler.reuse, llm.engine.seed) == (None, 3)
        more = {"prompt_token_ids": [1, 2, 3], "prompt": "abc", "multi_modal_data": {}, "type": "token"}
        assert llm.generate(more, GREEDY)[0].prompt_token_ids == [1, 2, 3]
    with pytest.raises(CheckpointError, match="is not a folder on this machine"):
        LLM(target / "model.safetensors")


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_tokenizer_may_come_from_another_folder(mute: LLM, target: Path, name: str) -> None:
    with LLM(mute.engine.model.path, tokenizer=target / name, seed=None) as llm:  # a seed that counts as 0
        assert llm.generate("abc", GREEDY)[0].prompt_token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate("abc", GREEDY), ("no tokenizer.json", "pass token ids, or tokenizer=FOLDER")),
        (lambda llm: llm.generate([1], SamplingParams(stop="a")), ("stop strings", "use stop_token_ids")),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}]), ("chat needs a tokenizer",)),
    ],
    ids=["text prompt", "stop string", "chat"],
)
def test_without_a_tokenizer_text_is_refused(mute: LLM, call: Callable[[LLM], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        call(mute)
    assert all(word in str(caught.value) for word in words), caught.value


# -- bad requests --------------------------------------------------------------------------------------------------

LONG = {"max_tokens": 1000, "temperature": 0.0}
BAD_REQUESTS: dict[str, tuple[Callable[[LLM], Any], type[TrtSpecError], tuple[str, ...]]] = {
    "empty prompt": (lambda llm: llm.generate([[]]), RequestError, ("prompt is empty", "at least one token")),
    "empty text": (lambda llm: llm.generate(""), RequestError, ("prompt is empty", "at least one token")),
    "id past the vocabulary": (lambda llm: llm.generate([1, VOCAB]), RequestError, ("token id 16", "0..15")),
    "negative id": (lambda llm: llm.generate([1, -1]), RequestError, ("token id -1", "0..15")),
    "bool id": (lambda llm: llm.generate([[1, True]]), RequestError, ("token id True", "0..15")),
    "str id": (lambda llm: llm.generate([[1, "a"]]), RequestError, ("token id 'a'", "0..15")),
    "float id": (lambda llm: llm.generate([[1, 2.0]]), RequestError, ("token id 2.0", "0..15")),
    "prompt that is a number": (lambda llm: llm.generate([1, "a"]), RequestError, ("prompt 1", "text", "token ids")),
    "prompt that is nothing": (lambda llm: llm.generate([None]), RequestError, ("prompt None", "text", "token ids")),
    "prompts that are nothing": (lambda llm: llm.generate(None), RequestError, ("None", "text", "token ids")),
    "dict without a prompt": (lambda llm: llm.generate({"text": "a"}), RequestError, ("text", '"prompt_token_ids"')),
    "dict of text with more": (
        lambda llm: llm.generate({"prompt": "a", "prompt_token_ids": None, "cache_salt": "b"}),
        RequestError,
        ("cache_salt of a prompt dict", "leave it out"),
    ),
    "dict of ids with more": (
        lambda llm: llm.generate({"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}),
        RequestError,
        ("multi_modal_data of a prompt dict",),
    ),
    "prompt as long as max_seq_len": (
        lambda llm: llm.generate([[1] * 512]),
        RequestError,
        ("512 tokens", "max_seq_len = 512", "shorten it or raise max_seq_len"),
    ),
    "more than the cache holds": (
        lambda llm: llm.generate([[1] * 100], SamplingParams(max_tokens=57)),
        CapacityError,
        ("157 tokens", "holds 156", "lower max_tokens", "num_kv_blocks"),
    ),
    "stop id past the vocabulary": (
        lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[VOCAB])),
        RequestError,
        ("stop_token_ids", "16"),
    ),
    "second prompt bad": (lambda llm: llm.generate(["abc", [VOCAB]]), RequestError, ("token id 16",)),
    "too few params": (
        lambda llm: llm.generate(["a", "b"], [GREEDY]),
        RequestError,
        ("1 sampling_params", "2 prompts"),
    ),
    "params that are a dict": (
        lambda llm: llm.generate("a", {"temperature": 0}),  # type: ignore[arg-type]
        RequestError,
        ("sampling_params = {'temperature': 0} must be SamplingParams(...), or a list",),
    ),
    "async params that are a dict": (
        lambda llm: llm.generate_async("a", {"temperature": 0}),  # type: ignore[arg-type]
        RequestError,
        ("sampling_params = {'temperature': 0} must be SamplingParams(...), or a list",),
    ),
    "chat without a template": (
        lambda llm: llm.chat([{"role": "user", "content": "a"}]),
        RequestError,
        ("no chat template", "chat_template="),
    ),
    "temperature below 0": (
        lambda llm: llm.generate("a", SamplingParams(temperature=-0.5)),
        RequestError,
        ("temperature = -0.5", ">= 0"),
    ),
    "top_p 0": (lambda llm: SamplingParams(top_p=0.0), RequestError, ("top_p = 0.0", "(0, 1]")),
    "top_p above 1": (lambda llm: SamplingParams(top_p=1.5), RequestError, ("top_p = 1.5", "(0, 1]")),
    "top_p not a number": (lambda llm: SamplingParams(top_p=float("nan")), RequestError, ("top_p = nan", "(0, 1]")),
    "max_tokens 0": (lambda llm: SamplingParams(max_tokens=0), RequestError, ("max_tokens = 0", ">= 1")),
    "n 0": (lambda llm: SamplingParams(n=0), RequestError, ("n = 0", ">= 1")),
    "min_tokens above max_tokens": (
        lambda llm: SamplingParams(min_tokens=9, max_tokens=8),
        RequestError,
        ("min_tokens = 9", "max_tokens = 8", "raise max_tokens"),
    ),
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_a_bad_request_is_an_error_that_helps(llm: LLM, what: str) -> None:
    call, error, words = BAD_REQUESTS[what]
    with pytest.raises(error) as caught:
        call(llm)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_after_a_bad_request_all_blocks_are_free_and_the_next_one_runs(
    llm: LLM, greedy_ids: list[int], what: str
) -> None:
    call, error, _ = BAD_REQUESTS[what]
    with pytest.raises(error):
        call(llm)
    assert not llm.engine.has_work
    assert_all_blocks_free(llm)
    assert one(llm, "abc", GREEDY).token_ids == greedy_ids[:12]


def test_a_request_that_just_fits_the_cache_runs(llm: LLM) -> None:
    assert len(one(llm, [[1] * 100], SamplingParams(max_tokens=56, ignore_eos=True)).token_ids) == 56


# -- bad configurations --------------------------------------------------------------------------------------------

DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def drafts(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Draft folders: one that fits, and some that do not."""
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "good": str(draft),
        "other vocabulary": str(make_target(folder, name="other", vocab_size=VOCAB + 8)),
        "short context": str(copy_of(draft, folder / "short", config={"max_position_embeddings": 3})),
        "missing": str(folder / "nowhere"),
        "empty": str(folder),
    }


BAD_SPECULATION: dict[str, tuple[dict[str, Any], type[TrtSpecError], tuple[str, ...]]] = {
    "other vocabulary": (DRAFT, ConfigError, ("vocab_size=24", "draft", "target's 16", "target's tokenizer")),
    "short context": (DRAFT, ConfigError, ("max_model_len=3", "draft", "num_speculative_tokens=3", "smaller K")),
    "missing": (DRAFT, CheckpointError, ("draft model", "nowhere", "not a folder", "download")),
    "empty": (DRAFT, CheckpointError, ("draft model", "config.json is missing")),
    "good": (
        {"method": "eagle3", "num_speculative_tokens": 3, "capture_layers": (0, 1)},
        UnsupportedError,
        ("draft model", "'LlamaForCausalLM' is no EAGLE3 head", "LlamaForCausalLMEagle3"),
    ),
}


@pytest.mark.parametrize("which", BAD_SPECULATION)
def test_a_bad_draft_is_an_error_that_helps(target: Path, drafts: dict[str, str], which: str) -> None:
    speculation, error, words = BAD_SPECULATION[which]
    with pytest.raises(error) as caught:
        LLM(target, {**speculation, "model": drafts[which]})
    assert all(word in str(caught.value) for word in words), caught.value


BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[TrtSpecError], tuple[str, ...]]] = {
    "unknown argument": ({"max_batchsize": 3}, ConfigError, ("max_batchsize", "known", "max_batch_size")),
    "unknown speculation field": (
        {"speculative_config": {**NGRAM, "num_spec_tokens": 3}},
        ConfigError,
        ("num_spec_tokens=3", "unknown field"),
    ),
    "K 0": (
        {"speculative_config": {**NGRAM, "num_speculative_tokens": 0}},
        ConfigError,
        ("num_speculative_tokens=0", "greater than or equal to 1", "leave speculative_config unset"),
    ),
    "K below 0": (
        {"speculative_config": {**NGRAM, "num_speculative_tokens": -1}},
        ConfigError,
        ("num_speculative_tokens=-1",),
    ),
    "unknown method": ({"speculative_config": {"method": "magic"}}, ConfigError, ("method='magic'", "use one of")),
    "MTP layers that the target does not have": (
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        UnsupportedError,
        ("MTP layers of model_type='llama'", "those of mimo run", "Use another method"),
    ),
    "speculation of the wrong type": (
        {"speculative_config": 3},
        ConfigError,
        ("speculative_config=3", "use None, a dict"),
    ),
    "drafter that does not exist": (
        {"speculative_config": {"method": "custom_class", "drafter": "no.such:Thing", "num_speculative_tokens": 2}},
        ConfigError,
        ("no.such:Thing", "package.module:Class"),
    ),
    "max_seq_len above the checkpoint's": ({"max_seq_len": 513}, ConfigError, ("max_seq_len = 513", "512", "lower it")),
    "steps too small for the batch": (
        {"speculative_config": NGRAM, "max_batch_size": 8, "max_num_tokens": 31},
        ConfigError,
        ("max_num_tokens = 31", "max_batch_size = 8", "raise it to 32"),
    ),
    "two sizes of the cache": (
        {"kv_cache_memory": 10_000, "num_kv_blocks": 10},
        ConfigError,
        ("kv_cache_memory = 10000", "num_kv_blocks = 10", "give one"),
    ),
    "cache of less than two blocks": ({"kv_cache_memory": 100}, CapacityError, ("kv_cache_memory = 100", "raise it")),
    "unknown dtype": ({"dtype": "int3"}, ConfigError, ("dtype = 'int3'", "use one of", "bfloat16")),
    "unknown device": ({"device": "tpu"}, ConfigError, ("device = 'tpu'", "use one of", "cpu")),
    "unknown backend": ({"backend": "magic"}, UnsupportedError, ("backend = 'magic'", "eager")),
    "tokenizer that does not exist": (
        {"tokenizer": "no/such/folder"},
        CheckpointError,
        ("'no/such/folder' has no tokenizer.json", "name a folder or file"),
    ),
    "seed that is no integer": ({"seed": "7"}, ConfigError, ("seed = '7' must be an integer",)),
    "switch that is a word": (
        {"enable_prefix_caching": "no"},
        ConfigError,
        ("enable_prefix_caching = 'no' must be True or False",),
    ),
    "batch of 0": ({"max_batch_size": 0}, ConfigError, ("max_batch_size = 0", ">= 1")),
    "forced below 0": ({"force_num_accepted_tokens": -1}, ConfigError, ("force_num_accepted_tokens = -1", ">= 0")),
}


@pytest.mark.parametrize("what", BAD_OPTIONS)
def test_a_bad_option_is_an_error_that_helps(target: Path, what: str) -> None:
    options, error, words = BAD_OPTIONS[what]
    with pytest.raises(error) as caught:
        LLM(target, **options)
    assert all(word in str(caught.value) for word in words), caught.value
