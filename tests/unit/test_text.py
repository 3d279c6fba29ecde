"""Text: tokenizer, incremental detokenizer and stop strings, each against a slower oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tokenizer_kinds import TOKENIZERS
from trtspec.errors import RequestError
from trtspec.text import IncrementalDetokenizer, StopMatcher, TextStream, Tokenizer

pytestmark = pytest.mark.slow

unicode_text = st.text(st.characters(codec="utf-8"), max_size=20) | st.text(
    st.sampled_from("the qu\n é日本😀👩\u200d👧e\u0301\ufffd"), max_size=20
)


@st.composite
def token_ids(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Encoded text mixed with arbitrary ids: cut characters, special tokens, ids outside the vocabulary."""
    ids: list[int] = []
    for text in draw(st.lists(unicode_text, max_size=3)):
        ids += tokenizer.encode(text, add_special_tokens=False)
        ids += draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=6))
    return ids


@st.composite
def chunked(draw: st.DrawFn, items: list[int] | str) -> list[Any]:
    """Pieces of `items`, cut at drawn places. Empty pieces are included."""
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=8)))
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_add_up_to_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(token_ids(tokenizer))
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    text = ""
    for chunk in data.draw(chunked(ids)):
        text += detokenizer.push(chunk)
    assert text + detokenizer.flush() == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_text_goes_on_from_its_prompt(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, ids = data.draw(token_ids(tokenizer)), data.draw(token_ids(tokenizer))
    detokenizer = IncrementalDetokenizer(tokenizer, skip, prompt)
    text = detokenizer.push(ids) + detokenizer.flush()
    last = [token for token in prompt[-1:] if tokenizer.is_visible(token, skip)]
    before = tokenizer.decode(last, skip)
    if "\ufffd" in before:
        last, before = [], ""
    whole = tokenizer.decode([*last, *ids], skip)
    run = tokenizer.is_byte_token(last[0]) if last else False  # a byte may be shown as U+FFFD in a run of others
    assert text == whole[len(before) :]
    assert run or whole.startswith(before)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "gemma"])
@settings(max_examples=100, deadline=None)
@given(text=unicode_text)
def test_bytes_of_tokens_add_up_to_the_text(name: str, text: str) -> None:
    """Also where a token is a part of a character. The space that some put before a text is one of theirs."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids).encode()
    assert b"".join(map(tokenizer.token_bytes, ids)) in (decoded, b" " + decoded)


def test_the_space_before_a_first_word_is_kept() -> None:
    """Decoders of SentencePiece drop it at the start of a text, and the text begins with the prompt."""
    tokenizer = TOKENIZERS["byte_fallback"]
    prompt, ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("the", "the"))
    line = 3 + ord("\n")  # <0x0A>
    assert tokenizer.decode([*prompt, line]) == "the\n"
    for before, expected in ((prompt, " the"), ([*prompt, line], " the"), ([], "the"), ([*prompt, 1], "the")):
        detokenizer = IncrementalDetokenizer(tokenizer, True, before)
        assert detokenizer.push(ids) + detokenizer.flush() == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_byte_level_text_is_not_held_back_longer_than_needed(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = data.draw(token_ids(tokenizer))
    detokenizer, text = IncrementalDetokenizer(tokenizer), ""
    for n, token in enumerate(ids, 1):
        text += detokenizer.push([token])
        assert text == tokenizer.decode(ids[:n]).removesuffix("\ufffd")


@pytest.mark.parametrize("junk", [b"\xff", b"\x80", b"\xf0\x9f", b"\xe2\x82"])
def test_endless_invalid_bytes_stream_with_small_state(junk: bytes) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    alphabet = {bytes([b]): i for b in range(256) if (i := byte_token(b)) is not None}
    ids = [alphabet[bytes([b])] for b in (b"ok" + junk * 100 + "é done".encode())]
    detokenizer, text, largest = IncrementalDetokenizer(tokenizer), "", 0
    for n, token in enumerate(ids, 1):
        text += detokenizer.push([token])
        largest = max(largest, len(detokenizer._window))
        assert text == tokenizer.decode(ids[:n]).removesuffix("\ufffd")
    assert text + detokenizer.flush() == tokenizer.decode(ids)
    assert largest <= 32


def byte_token(byte: int) -> int | None:
    """The byte-level token of one byte. GPT-2's table maps printable bytes to themselves, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    char = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return TOKENIZERS["byte_level"]._backend.token_to_id(char)


def test_a_leading_space_survives_skipped_special_tokens() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    word = tokenizer.encode("the", add_special_tokens=False)
    eos = tokenizer._backend.token_to_id("</s>")
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.push(word), detokenizer.push([eos]), detokenizer.push(word)]
    assert deltas == ["the", "", " the"]


def test_byte_fallback_runs_are_judged_as_a_whole() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    e_acute, lone = [3 + b for b in "é".encode()], 3 + 0x80
    end = tokenizer._backend.token_to_id("t")
    for ids, text in (([*e_acute, end], "ét"), ([*e_acute, lone, end], "\ufffd" * 3 + "t")):
        assert tokenizer.decode(ids) == text
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert [detokenizer.push([token]) for token in ids] == [""] * (len(ids) - 1) + [text]


# Stop strings over a small alphabet, so that matches and near-matches are common.
stop_strings = st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3)


def cut_at_stop(text: str, stops: list[str], include: bool, after: int = 0) -> tuple[str, str | None]:
    """Return the part of `text` that may be shown, and the stop that cuts it.

    The stop that ends first, past `after` characters, cuts it. Of several, the longest one counts.
    """
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=400, deadline=None)
@given(data=st.data(), text=st.text("ab é", max_size=16), stops=stop_strings, include=st.booleans())
def test_stop_found_at_any_split(data: st.DataObject, text: str, stops: list[str], include: bool) -> None:
    matcher, shown, seen = StopMatcher(stops, include), "", ""
    expected, stop = cut_at_stop(text, stops, include)
    for chunk in data.draw(chunked(text)):
        shown += matcher.push(chunk)
        seen += chunk
        assert expected.startswith(shown)
        if matcher.matched is None:
            # The matcher holds back only the beginning of a stop string
            held = seen[len(shown) :]
            assert not held or any(s.startswith(held) and s != held for s in stops)
            assert not any(stop in shown for stop in stops)
    assert matcher.matched == stop
    assert shown + matcher.flush() == expected


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopMatcher(["a", ""])


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    text=st.text("ab é😀", max_size=24),
    stops=stop_strings,
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_stream_stops_after_the_same_token_however_steps_are_cut(
    data: st.DataObject, text: str, stops: list[str], include: bool, min_tokens: int
) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    settled = [tokenizer.decode(ids[:n]).removesuffix("\ufffd") for n in range(len(ids) + 1)]
    after = len(settled[min(min_tokens, len(ids))])
    expected, stop = cut_at_stop(settled[-1], stops, include, after)
    num_tokens = len(ids)
    if stop is not None:
        num_tokens = next(n for n, known in enumerate(settled) if cut_at_stop(known, stops, include, after)[1])

    stream = TextStream(
        tokenizer, stops, include_stop_str_in_output=include, min_tokens=min_tokens, skip_special_tokens=True
    )
    shown = ""
    for chunk in data.draw(chunked(ids)):
        shown += stream.push(chunk)
        assert expected.startswith(shown)
    assert (stream.matched_stop, stream.num_tokens) == (stop, num_tokens)
    assert stream.push(ids) == "" or stop is None
    if stop is None:
        return
    assert shown + stream.flush() == expected == stream.text


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)))
def test_stream_without_stop_strings_is_decode(data: st.DataObject, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(token_ids(tokenizer))
    stream = TextStream(tokenizer)
    shown = "".join([stream.push(chunk) for chunk in data.draw(chunked(ids))]) + stream.flush()
    assert shown == stream.text == tokenizer.decode(ids)
    assert stream.num_tokens == len(ids)


def test_stop_string_in_a_byte_run_is_found_when_the_run_ends() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    run = [3 + b for b in "xéy".encode()]
    stream = TextStream(tokenizer, ["é"])
    assert stream.push(run) == ""
    assert stream.flush() == "x"
    assert stream.matched_stop == "é"
