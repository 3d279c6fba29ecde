"""LLM as a caller sees it: all forms of prompts, outputs and their ends, and shutdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import api_cases
from tests.e2e.api_cases import GREEDY, NGRAM, copy_of, ending, one
from tests.e2e.tiny import EOS, PIECES, assert_all_blocks_free
from trtspec import LLM, SamplingParams
from trtspec.errors import EngineError

llm = api_cases.llm
greedy_ids = api_cases.greedy_ids
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)


# -- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    ["abc", [1, 2, 3], (1, 2, 3), {"prompt": "abc", "prompt_token_ids": None}, {"prompt_token_ids": [1, 2, 3]}],
)
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


# -- outputs -------------------------------------------------------------------------------------------------------


def test_the_text_is_that_of_the_ids(llm: LLM) -> None:
    output = one(llm, "abc", SAMPLED)
    assert output.text == "".join(PIECES[token] for token in output.token_ids if token != EOS)


def test_acceptance_is_counted_per_request(llm: LLM) -> None:
    (output,) = llm.generate([[1, 2, 3, 4] * 4], GREEDY)
    accepted = sum(output.speculation.accepted)
    assert output.steps + accepted == len(output.outputs[0].token_ids) - 1  # the prompt's step emits the first token


def test_acceptance_length_is_of_steps_with_drafts_and_tokens_per_step_of_all(llm: LLM) -> None:
    (output,) = llm.generate([[1, 2, 3, 4] * 4], GREEDY)
    accepted, num_drafts = sum(output.speculation.accepted), output.speculation.num_drafts
    assert 0 < num_drafts < output.steps  # the last step has no drafts: one token is left
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


def first_new(ids: list[int], at_least: int = 3) -> int:
    """Index of the first new token from `at_least` on that is not the end of sequence.

    New: no token before is equal.
    """
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
    """An LLM whose generation_config.json names one more end of sequence, and its index in the greedy output."""
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
    """A checkpoint that asks for temperature 0.7 and top_k 1, which amounts to greedy decoding."""
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


# -- shutdown ------------------------------------------------------------------------------------------------------


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
