"""LLM as a caller sees it: prompts in all their forms, what comes back, and errors that leave it working."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import EOS, PIECES, VOCAB, assert_all_blocks_free, make_target
from trtspec import LLM, SamplingParams
from trtspec.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineError,
    RequestError,
    TrtSpecError,
    UnsupportedError,
)
from trtspec.outputs import CompletionOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def llm(target: Path) -> Iterator[LLM]:
    with LLM(target, NGRAM, num_kv_blocks=40, block_size=4, max_batch_size=8) as llm:
        yield llm


def one(llm: LLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    (output,) = llm.generate(prompt, params)
    return output.outputs[0]


def copy_of(folder: Path, to: Path, **json_files: dict[str, Any]) -> Path:
    """The checkpoint with some of its json files changed: name -> fields to set."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for name, fields in json_files.items():
        file = to / f"{name}.json"
        old = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**old, **fields}))
    return to


# -- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["abc", [1, 2, 3], (1, 2, 3), {"prompt": "abc"}, {"prompt_token_ids": [1, 2, 3]}])
def test_one_prompt_in_any_form(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate([prompt] if isinstance(prompt, tuple) else prompt, GREEDY)
    assert output.prompt_token_ids == [1, 2, 3]


def test_many_prompts_in_many_forms_come_back_in_order(llm: LLM) -> None:
    outputs = llm.generate(["abc", [4, 5], {"prompt": "d"}, {"prompt_token_ids": [7]}], GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [[1, 2, 3], [4, 5], [4], [7]]


def test_a_text_prompt_is_handed_back(llm: LLM) -> None:
    outputs = llm.generate(["abc", {"prompt": "d"}, {"prompt_token_ids": [7]}], GREEDY)
    assert [output.prompt for output in outputs] == ["abc", "d", None]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_sampling_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 1, 5)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 5]


def test_without_sampling_params_16_tokens_at_most_are_drawn(llm: LLM) -> None:
    assert 1 <= len(one(llm, "abc", None).token_ids) <= 16  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def chat_llm(target: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = copy_of(target, tmp_path_factory.mktemp("chat") / "model")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}g{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return LLM(folder)


def test_chat_renders_one_conversation(chat_llm: LLM) -> None:
    (output,) = chat_llm.chat([{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}], GREEDY)
    assert output.prompt_token_ids == [1, 2, 3, PIECES.index("g")]


def test_chat_takes_several_conversations(chat_llm: LLM) -> None:
    outputs = chat_llm.chat([[{"role": "user", "content": "ab"}], [{"role": "user", "content": "c"}]], GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [[1, 2, 7], [3, 7]]


def test_chat_hands_options_to_the_template(chat_llm: LLM) -> None:
    (output,) = chat_llm.chat([{"role": "user", "content": "ab"}], GREEDY, add_generation_prompt=False)
    assert output.prompt_token_ids == [1, 2]


# -- what comes back -----------------------------------------------------------------------------------------------


def test_the_text_is_that_of_the_ids(llm: LLM) -> None:
    output = one(llm, "abc", SAMPLED)
    assert output.text == "".join(PIECES[token] for token in output.token_ids if token != EOS)


def test_acceptance_is_counted_per_request(llm: LLM) -> None:
    (output,) = llm.generate([[1, 2, 3, 4] * 4], GREEDY)
    accepted = sum(output.speculation.accepted)
    assert output.steps + accepted == len(output.outputs[0].token_ids) - 1  # the first token comes with the prompt


def test_acceptance_length_is_of_steps_with_drafts_and_tokens_per_step_of_all(llm: LLM) -> None:
    (output,) = llm.generate([[1, 2, 3, 4] * 4], GREEDY)
    accepted, num_drafts = sum(output.speculation.accepted), output.speculation.num_drafts
    assert 0 < num_drafts < output.steps  # the last step has none: one token is left
    assert output.acceptance_length == pytest.approx(1 + accepted / num_drafts)
    assert output.tokens_per_step == pytest.approx((len(output.outputs[0].token_ids) - 1) / output.steps)
    assert output.acceptance_length > output.tokens_per_step


def test_acceptance_per_position_has_one_share_per_draft_position(llm: LLM) -> None:
    (output,) = llm.generate([[1, 2, 3, 4] * 4], GREEDY)
    assert len(output.acceptance_per_position) == 3
    assert all(0 <= share <= 1 for share in output.acceptance_per_position)


def test_metrics_add_up(target: Path) -> None:
    with LLM(target, NGRAM) as llm:
        outputs = llm.generate([[1, 2, 3], [4]], SAMPLED)
        metrics = llm.get_metrics()
    assert metrics.prompt_tokens == 4
    assert metrics.output_tokens == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert metrics.finished == {"length": 2}
    assert metrics.speculation.steps == sum(output.steps for output in outputs)
    assert 0 < metrics.launch_time <= metrics.step_time


# -- samples and seeds ---------------------------------------------------------------------------------------------


def samples(llm: LLM, n: int, seed: int | None = 11) -> list[list[int]]:
    params = SamplingParams(n=n, temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True)
    return [list(sample.token_ids) for sample in llm.generate("abc", params)[0].outputs]


def test_sample_zero_is_that_of_a_single_sample(llm: LLM) -> None:
    assert samples(llm, 4)[0] == samples(llm, 1)[0]


def test_more_samples_do_not_change_the_first_ones(llm: LLM) -> None:
    assert samples(llm, 5)[:3] == samples(llm, 3)


def test_samples_differ(llm: LLM) -> None:
    assert len({tuple(ids) for ids in samples(llm, 4)}) == 4


def test_samples_are_numbered(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(n=3, seed=1))
    assert [sample.index for sample in output.outputs] == [0, 1, 2]


def test_samples_share_the_full_blocks_of_their_prompt(llm: LLM) -> None:
    engine = llm.engine
    requests = engine.add_request([1] * 13, SamplingParams(n=3, temperature=1.0, seed=1, ignore_eos=True))
    engine.step()
    engine.step()
    shared = [request.kv.blocks[:3] for request in requests]
    for request in requests:
        engine.abort(request.request_id)
    assert len(shared[0]) == 3
    assert shared == [shared[0]] * 3


def test_an_unset_seed_is_drawn_and_handed_back(llm: LLM) -> None:
    first = one(llm, "abc", SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True))
    again = one(llm, "abc", SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_unset_seeds_differ_from_request_to_request(llm: LLM) -> None:
    assert samples(llm, 1, seed=None) != samples(llm, 1, seed=None)


@pytest.mark.parametrize(("seed", "same"), [(0, True), (1, False)])
def test_unset_seeds_follow_from_the_seed_of_the_engine(target: Path, seed: int, same: bool) -> None:
    with LLM(target, seed=0) as first, LLM(target, seed=seed) as second:
        assert (samples(first, 1, seed=None) == samples(second, 1, seed=None)) == same


def test_a_greedy_sample_has_no_seed(llm: LLM) -> None:
    assert one(llm, "abc", GREEDY).seed is None


# -- streams -------------------------------------------------------------------------------------------------------


def test_a_stream_brings_the_ids_of_generate(llm: LLM) -> None:
    streamed = [token for delta in llm.stream("abc", SAMPLED) for token in delta.token_ids]
    assert streamed == one(llm, "abc", SAMPLED).token_ids


@pytest.mark.parametrize("stop", [(), ("dé",), ("b c", "gg")])
def test_streamed_text_in_a_row_is_the_text_of_generate(llm: LLM, stop: tuple[str, ...]) -> None:
    for seed in range(5):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=30, stop=stop, ignore_eos=True)
        assert "".join(delta.text for delta in llm.stream("abc", params)) == one(llm, "abc", params).text


def test_a_stream_tells_samples_apart(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    streamed: dict[int, list[int]] = {}
    for delta in llm.stream("abc", params):
        streamed.setdefault(delta.index, []).extend(delta.token_ids)
    assert list(streamed.values()) == samples(llm, 2)


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("abc", SamplingParams(n=2, max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert_all_blocks_free(llm)


# -- ends ----------------------------------------------------------------------------------------------------------


def ending(llm: LLM, **fields: Any) -> CompletionOutput:
    """Greedy: the text begins "bbb..." or whatever; what counts is where it ends."""
    return one(llm, "abc", SamplingParams(**{"temperature": 0.0, "max_tokens": 30, **fields}))


@pytest.fixture(scope="module")
def greedy_ids(llm: LLM) -> list[int]:
    return list(ending(llm, ignore_eos=True).token_ids)


def first_new(ids: list[int], at_least: int = 3) -> int:
    """Index of the first token from `at_least` on that did not occur before, and is not the end of sequence."""
    return next(i for i, token in enumerate(ids) if i >= at_least and token not in ids[:i] and token != EOS)


def test_max_tokens_ends_with_length(llm: LLM) -> None:
    output = ending(llm, max_tokens=5, ignore_eos=True)
    assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (5, "length", None)


def test_max_seq_len_ends_with_length(target: Path) -> None:
    with LLM(target, max_seq_len=10) as llm:
        output = one(llm, "abc", SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (7, "length")


def test_a_stop_token_is_the_last_id_and_the_reason(llm: LLM, greedy_ids: list[int]) -> None:
    at = first_new(greedy_ids)
    output = ending(llm, stop_token_ids=[greedy_ids[at]], ignore_eos=True)
    assert (output.token_ids, output.stop_reason) == (greedy_ids[: at + 1], greedy_ids[at])


def test_the_text_of_a_stop_token_is_left_out(llm: LLM, greedy_ids: list[int]) -> None:
    at = first_new(greedy_ids)
    output = ending(llm, stop_token_ids=[greedy_ids[at]], ignore_eos=True)
    assert output.text == "".join(PIECES[token] for token in greedy_ids[:at])


def test_the_text_of_a_stop_token_is_kept_if_asked_for(llm: LLM, greedy_ids: list[int]) -> None:
    at = first_new(greedy_ids)
    stop = greedy_ids[at]
    output = ending(llm, stop_token_ids=[stop], ignore_eos=True, include_stop_str_in_output=True)
    assert output.text == "".join(PIECES[token] for token in greedy_ids[: at + 1])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_the_reason_and_the_end_of_the_text(llm: LLM, greedy_ids: list[int], include: bool) -> None:
    text = "".join(PIECES[token] for token in greedy_ids)
    stop = text[4:6]
    output = ending(llm, stop=stop, ignore_eos=True, include_stop_str_in_output=include)
    assert (output.text, output.stop_reason) == (text[: text.index(stop)] + stop * include, stop)


@pytest.fixture(scope="module")
def eos_llm(target: Path, greedy_ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, int]:
    """An LLM whose generation_config.json names one more end of sequence, which greedy text meets; and where."""
    at = first_new(greedy_ids)
    folder = tmp_path_factory.mktemp("eos") / "model"
    return LLM(copy_of(target, folder, generation_config={"eos_token_id": [EOS, greedy_ids[at]]})), at


def test_end_of_sequence_has_no_reason(eos_llm: tuple[LLM, int]) -> None:
    output = ending(eos_llm[0])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_any_end_of_sequence_of_generation_config_ends(eos_llm: tuple[LLM, int], greedy_ids: list[int]) -> None:
    llm, at = eos_llm
    assert ending(llm).token_ids == greedy_ids[: at + 1]


def test_ignore_eos_goes_on(eos_llm: tuple[LLM, int], greedy_ids: list[int]) -> None:
    assert ending(eos_llm[0], ignore_eos=True).token_ids == greedy_ids


def test_before_min_tokens_no_end_of_sequence_is_drawn(eos_llm: tuple[LLM, int], greedy_ids: list[int]) -> None:
    llm, at = eos_llm
    output = ending(llm, min_tokens=at + 1)
    assert len(output.token_ids) > at + 1
    assert greedy_ids[at] not in output.token_ids[: at + 1]


def test_before_min_tokens_no_stop_string_counts(llm: LLM, greedy_ids: list[int]) -> None:
    stop = "".join(PIECES[token] for token in greedy_ids)[1:3]
    assert len(ending(llm, stop=stop, ignore_eos=True, min_tokens=10).token_ids) > 10


def test_special_tokens_are_shown_if_asked_for(llm: LLM) -> None:
    shown = [ending(llm, temperature=1.0, seed=s, ignore_eos=True, skip_special_tokens=False).text for s in range(5)]
    assert any(PIECES[EOS] in text for text in shown)


def test_without_detokenizing_there_are_ids_only(llm: LLM, greedy_ids: list[int]) -> None:
    output = ending(llm, ignore_eos=True, detokenize=False)
    assert (output.text, output.token_ids) == ("", greedy_ids)


# -- generation_config.json ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opinionated(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that wants temperature 0.7 and top_k 1, which is as good as greedy."""
    folder = tmp_path_factory.mktemp("opinionated") / "model"
    return copy_of(target, folder, generation_config={"do_sample": True, "temperature": 0.7, "top_k": 1})


UNSET = SamplingParams(max_tokens=20, ignore_eos=True, seed=3)


def test_unset_fields_come_from_generation_config(opinionated: Path, llm: LLM, greedy_ids: list[int]) -> None:
    assert one(LLM(opinionated), "abc", UNSET).token_ids == greedy_ids[:20]


def test_generation_config_can_be_switched_off(opinionated: Path, llm: LLM) -> None:
    plain = SamplingParams(max_tokens=20, ignore_eos=True, seed=3, temperature=1.0)
    assert one(LLM(opinionated, generation_config="off"), "abc", UNSET).token_ids == one(llm, "abc", plain).token_ids


def test_set_fields_win_over_generation_config(opinionated: Path, llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=3, temperature=1.0, top_k=0)
    assert one(LLM(opinionated), "abc", params).token_ids == one(llm, "abc", params).token_ids


# -- life and death ------------------------------------------------------------------------------------------------


def test_after_shutdown_calls_say_so(target: Path) -> None:
    llm = LLM(target)
    llm.shutdown()
    with pytest.raises(EngineError, match="shut down; make a new one"):
        llm.generate("abc", GREEDY)


def test_the_context_manager_shuts_down(target: Path) -> None:
    with LLM(target) as llm:
        pass
    with pytest.raises(EngineError, match="shut down"):
        llm.get_metrics()


def test_shutdown_twice_is_once(target: Path) -> None:
    llm = LLM(target)
    llm.shutdown()
    llm.shutdown()


# -- a folder without a tokenizer ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mute(target: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = copy_of(target, tmp_path_factory.mktemp("mute") / "model")
    (folder / "tokenizer.json").unlink()
    return LLM(folder)


def test_without_a_tokenizer_ids_work(mute: LLM, greedy_ids: list[int]) -> None:
    output = one(mute, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert (output.text, output.token_ids) == ("", greedy_ids)


def test_a_tokenizer_may_come_from_another_folder(mute: LLM, target: Path) -> None:
    with LLM(mute.engine.model.path, tokenizer=target) as llm:
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
    "batch of 0": ({"max_batch_size": 0}, ConfigError, ("max_batch_size = 0", ">= 1")),
    "forced below 0": ({"force_num_accepted_tokens": -1}, ConfigError, ("force_num_accepted_tokens = -1", ">= 0")),
}


@pytest.mark.parametrize("what", BAD_OPTIONS)
def test_a_bad_option_is_an_error_that_helps(target: Path, what: str) -> None:
    options, error, words = BAD_OPTIONS[what]
    with pytest.raises(error) as caught:
        LLM(target, **options)
    assert all(word in str(caught.value) for word in words), caught.value
