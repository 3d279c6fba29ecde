"""Training batches of conversations: the assistant's tokens, the target's own answers, and packed windows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from trtspec.errors import ConfigError
from trtspec.sampling_params import SamplingParams
from trtspec.text.tokenizer import Tokenizer
from trtspec.train.chat import PackedWindows, TaughtText, pack, read_chats, taught_texts, turns
from trtspec.train.regenerate import Manner, Speaker, Words, answer_chats

LETTERS = "abcdefghijklmnopqrstuvwxyz ?!\n"
SPECIAL = ("<u>", "<a>", "<end>")
END = len(LETTERS) + SPECIAL.index("<end>")

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m.role[0] }}>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('!')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
"""A template that leaves out of earlier answers what comes before a "!", as some leave out thoughts."""


def make_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """A tokenizer with one id per letter."""
    ids = {letter: i for i, letter in enumerate((*LETTERS, *SPECIAL))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, {"eos_token": "<end>"}, {"default": template})


def chat(*said: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


def answers(text: TaughtText, tokenizer: Tokenizer) -> list[str]:
    """Texts of the runs of ids that are taught."""
    found, run = [], []
    for token, own in [*zip(text.ids, text.is_answer, strict=True), (0, False)]:
        if own:
            run.append(token)
        elif run:
            found.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return found


# -- what is taught ---------------------------------------------------------------------------------------------------


def test_answers_alone_are_taught_up_to_what_ends_them() -> None:
    tokenizer = make_tokenizer()
    (text,) = taught_texts(chat("hi", "hello", "go on", "no"), tokenizer, [END])
    assert (
        tokenizer.decode(text.ids, skip_special_tokens=False) == "<u>hi<end>\n<a>hello<end>\n<u>go on<end>\n<a>no<end>"
    )
    assert answers(text, tokenizer) == ["hello<end>", "no<end>"]


def test_a_greeting_is_not_an_answer() -> None:
    tokenizer = make_tokenizer()
    greeted = [{"role": "assistant", "content": "welcome"}, *chat("hi", "hello")]
    (text,) = taught_texts(greeted, tokenizer, [END])
    assert answers(text, tokenizer) == ["hello<end>"]
    assert list(turns(greeted)) == [chat("hi")]
    system = {"role": "system", "content": "be brief"}
    assert list(turns([system, *chat("hi", "hello", "go on")])) == [[system, *chat("hi")], chat("go on")]


def test_turns_that_the_template_writes_anew_are_texts_of_their_own() -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    texts = taught_texts(chat("hi", "think!hello", "go on", "hm!no"), tokenizer, [END])
    whole = [tokenizer.decode(text.ids, skip_special_tokens=False) for text in texts]
    assert whole == ["<u>hi<end>\n<a>think!hello<end>", "<u>hi<end>\n<a>hello<end>\n<u>go on<end>\n<a>hm!no<end>"]
    assert [answers(text, tokenizer) for text in texts] == [["think!hello<end>"], ["hm!no<end>"]]


def test_an_answer_that_the_template_begins_in_another_way() -> None:
    """An answer is taught after the generation prompt, though the template writes existing answers without it."""
    tokenizer = make_tokenizer(TEMPLATE.replace("%}<a>{%", "%}<a> {%"))
    (text,) = taught_texts(chat("hi", "hello"), tokenizer, [END])
    assert tokenizer.decode(text.ids, skip_special_tokens=False) == "<u>hi<end>\n<a> hello<end>"
    assert answers(text, tokenizer) == ["hello<end>"]


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match=r"begins with 'hi': .*roles must alternate"):
        taught_texts(chat("hi", "hello"), tokenizer, [END])


# -- packing ----------------------------------------------------------------------------------------------------------


def test_every_answer_is_in_the_windows_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        seq = int(rng.integers(4, 40))
        texts = []
        for _ in range(int(rng.integers(1, 30))):
            size = int(rng.integers(2, 60))
            own = rng.random(size) < 0.5
            own[0] = False
            texts.append(TaughtText(rng.integers(1, 1000, size).tolist(), own.tolist()))
        rows, lost = pack(texts, seq)
        windows = PackedWindows(rows)
        said = [token for text in texts for token, own in zip(text.ids[:seq], text.is_answer[:seq], strict=True) if own]
        assert sorted(windows.answers().tolist()) == sorted(said)
        assert lost == sum(sum(text.is_answer[seq:]) for text in texts)
        found = []
        for index in range(len(windows)):
            inputs, places, taught = (column.tolist() for column in windows[index])
            starts = [p for p in range(seq) if places[p] == 0]
            for start, end in zip(starts, [*starts[1:], seq], strict=True):
                assert places[start:end] == list(range(end - start))
                assert not taught[end - 1]  # what follows is not part of the text
                if any(inputs[start:end]):
                    found.append(inputs[start:end])
        assert sorted(found) == sorted(text.ids[:seq] for text in texts)
        filled = sum(min(len(text.ids), seq) for text in texts)
        assert len(windows) <= max(2 * filled / seq + 1, 1)  # first fit never leaves two windows half empty


# -- files ------------------------------------------------------------------------------------------------------------


def test_both_ways_to_write_a_conversation(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    ours.write_text(json.dumps({"messages": chat("hi", "hello")}) + "\n\n")
    pairs = [("human", "hi"), ("gpt", "hello")]
    theirs.write_text(json.dumps({"conversations": [{"from": who, "value": what} for who, what in pairs]}))
    assert read_chats(ours) == read_chats(theirs) == [chat("hi", "hello")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[]", "line 2 has no list of messages"),
        ('{"text": "a"}', "line 2 has no list of messages"),
        ('{"messages": ["a"]}', "line 2 has no list of messages"),
        ('{"messages": [{"role": "user"}]}', "line 2 has the message .*role and content are to be text"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "role and content are to be text"),
        ('{"conversations": [{"from": "tool", "value": "a"}]}', "role and content are to be text"),
        ('{"conversations": [{"from": ["human"], "value": "a"}]}', "role and content are to be text"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 2 has no message of the user"),
    ],
)
def test_lines_that_are_no_conversation(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": chat("hi", "hello")}) + "\n" + line)
    with pytest.raises(ConfigError, match=message):
        read_chats(file)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no conversation"):
        read_chats(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_chats(file)


# -- the target's own answers -----------------------------------------------------------------------------------------


class Echo(Speaker):
    """A speaker that repeats the last message without its vowels. It ends its turn unless max_tokens is too short."""

    def __init__(self, tokenizer: Tokenizer, max_seq_len: int) -> None:
        super().__init__(Path("nowhere"), Path("nowhere"), max_seq_len)
        self.tokenizer, self.asked = tokenizer, []

    def say(self, label: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Words]:
        found = []
        for prompt, own in zip(prompts, params, strict=True):
            text = self.tokenizer.decode(prompt, skip_special_tokens=False)
            self.asked.append(text)
            last = text.split("<u>")[-1].split("<end>")[0]
            ids = [*self.tokenizer.encode("".join(c for c in last if c not in "aeiou")), END]
            found.append(Words(ids[: own.max_tokens], len(ids) <= (own.max_tokens or 0)))
        return found


def test_the_target_answers_turn_by_turn_on_what_it_said_itself() -> None:
    tokenizer = make_tokenizer()
    speaker = Echo(tokenizer, 80)
    texts = answer_chats(speaker, [chat("one", "x", "two", "y"), chat("three")], tokenizer, 80, 16, Manner())
    assert speaker.asked == [
        "<u>one<end>\n<a>", "<u>three<end>\n<a>", "<u>one<end>\n<a>n<end>\n<u>two<end>\n<a>"
    ]  # fmt: skip
    assert [answers(text, tokenizer) for text in texts] == [["n<end>", "tw<end>"], ["thr<end>"]]


def test_a_conversation_ends_where_it_becomes_too_long(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer()
    said = ("rrrrr", "", "sssss", "", "ttttt")
    cut = answer_chats(Echo(tokenizer, 80), [chat(*said)], tokenizer, 80, 4, Manner())
    assert [answers(text, tokenizer) for text in cut] == [["rrrr"]]  # its answer did not end
    long = answer_chats(Echo(tokenizer, 80), [chat(*said), chat("u" * 40)], tokenizer, 24, 16, Manner())
    assert [answers(text, tokenizer) for text in long] == [["rrrrr<end>"]]  # and no turn after it fits
    assert "1 of 2 conversations begin with more than 24 tokens" in caplog.text


def test_sampled_answers_have_seeds_of_their_own() -> None:
    manner = Manner(temperature=0.8, seed=3)
    seeds = {manner.params(9, chat, turn).seed for chat in range(200) for turn in range(3)}
    assert len(seeds) == 600
    assert manner.params(9, 5, 1) == manner.params(9, 5, 1)
    assert Manner(seed=3).params(9, 5, 1).seed is None
