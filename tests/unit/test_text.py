"""Text: tokenizer, incremental detokenizer, stop strings and chat templates, each against a slower oracle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from trtspec.errors import CheckpointError, RequestError
from trtspec.text import IncrementalDetokenizer, StopMatcher, TextStream, Tokenizer

CORPUS = [
    "def main(argv): return 0",
    "the quick brown fox jumps over the lazy dog",
    "naïve café, déjà vu, Füße",
    "日本語のテキスト, 中文字符",
    "😀 👩‍👩‍👧 e\u0301 ﷽",
    "if x:\n    y = x + 1\n",
] * 4


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2 family (Llama 3, Qwen): tokens are pieces of UTF-8, often not whole characters."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_tokens(["<tool é>"])  # added, but not special
    tok.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return tok


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece as in Llama 2: "▁" begins a word, unknown characters are <0xNN> tokens, the first space is cut."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    names += [name for name in learnt["vocab"] if name not in names]
    tok = tokenizers.Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(merge) for merge in learnt["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens(["<s>", "</s>"])
    return tok


def with_decoder(decoder: Any) -> Callable[[], tokenizers.Tokenizer]:
    def build() -> tokenizers.Tokenizer:
        tok = byte_fallback()
        tok.decoder = decoder
        return tok

    return build


def word_end() -> tokenizers.Tokenizer:
    """Original BPE: "</w>" ends a word and is a space, except in the last token."""
    tok = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.decoder = decoders.BPEDecoder(suffix="</w>")
    special = ["<unk>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=200, end_of_word_suffix="</w>", special_tokens=special, show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def no_decoder() -> tokenizers.Tokenizer:
    tok = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "[UNK]": 3}, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    return tok


BUILDERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": with_decoder(decoders.Metaspace(prepend_scheme="always")),
    "gemma": with_decoder(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
    "wordpiece": with_decoder(decoders.WordPiece(prefix="▁", cleanup=True)),
    "word_end": word_end,
    "no_decoder": no_decoder,
}
TOKENIZERS = {name: Tokenizer(build()) for name, build in BUILDERS.items()}

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
    """`items` cut at drawn places, empty pieces included."""
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=8)))
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_add_up_to_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(token_ids(tokenizer))
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    text = ""
    for chunk in data.draw(chunked(ids)):
        text += detokenizer.push(chunk)
    assert text + detokenizer.flush() == tokenizer.decode(ids, skip)


@settings(max_examples=300, deadline=None)
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
    """The byte-level token of one byte: GPT-2's table maps printable bytes to themselves, the rest from U+0100 on."""
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


# Stop strings. A small alphabet, so that matches and near-matches are common.
stop_strings = st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3)


def cut_at_stop(text: str, stops: list[str], include: bool, after: int = 0) -> tuple[str, str | None]:
    """What may be shown of `text`: the stop ending first (past `after` characters) cuts it, the longest of those."""
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=1000, deadline=None)
@given(data=st.data(), text=st.text("ab é", max_size=16), stops=stop_strings, include=st.booleans())
def test_stop_found_at_any_split(data: st.DataObject, text: str, stops: list[str], include: bool) -> None:
    matcher, shown, seen = StopMatcher(stops, include), "", ""
    expected, stop = cut_at_stop(text, stops, include)
    for chunk in data.draw(chunked(text)):
        shown += matcher.push(chunk)
        seen += chunk
        assert expected.startswith(shown)
        if matcher.matched is None:
            # Held back is the beginning of a stop string, and nothing more than that
            held = seen[len(shown) :]
            assert not held or any(s.startswith(held) and s != held for s in stops)
            assert not any(stop in shown for stop in stops)
    assert matcher.matched == stop
    assert shown + matcher.flush() == expected


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopMatcher(["a", ""])


@settings(max_examples=500, deadline=None)
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


# Tokenizer folders.
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
EVERYTHING = """{{ bos_token }}{% set ns = namespace(seen=false) %}
{% if not strftime_now is defined %}no clock{% endif %}
Year {{ strftime_now("%Y") }}
{% if tools is not none %}
    {% for tool in tools %}
{{ tool | tojson(indent=2) }}
    {% endfor %}
{% endif %}
{% for message in messages %}
  {% if message.role == 'system' %}
    {% continue %}
  {% elif message.role == 'stop' %}
    {% break %}
  {% endif %}
  {% if message.role not in ['user', 'assistant'] %}
    {{ raise_exception('role ' + message.role + ' is unknown') }}
  {% endif %}
  {% set ns.seen = true %}
  {% generation %}
[{{ message.role | upper }}] {{ message.content | trim }} {{ message | tojson }}{{ eos_token }}
  {% endgeneration %}
{% endfor %}
{% if 'name' in messages[0] %}named{% endif %}
{{ ns.seen }}{% if add_generation_prompt %}[ASSISTANT]{% endif %}"""

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.", "name": None},
    {"role": "user", "content": "  a < b & 'c' é 😀 "},
    {"role": "assistant", "content": "yes\n"},
    {"role": "user", "content": "<|eos|> again"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": "<é>"}}}]


def save_tokenizer(folder: Path, template: str | None = None, in_config: bool = False) -> Path:
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<|bos|>", eos_token="<|eos|>", chat_template=template
    )
    fast.save_pretrained(folder, save_jinja_files=not in_config)
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("in_config", [False, True])
@pytest.mark.parametrize("template", [CHATML, EVERYTHING])
def test_chat_template_renders_as_transformers_does(tmp_path: Path, template: str, in_config: bool) -> None:
    save_tokenizer(tmp_path, template, in_config)
    assert (tmp_path / "chat_template.jinja").is_file() is not in_config
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load(tmp_path)
    for prompt in (False, True):
        for tools in (None, TOOLS):
            text = theirs.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=prompt, tokenize=False)
            ids = theirs.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=prompt)["input_ids"]
            assert ours.render_chat(MESSAGES, tools=tools, add_generation_prompt=prompt) == text
            assert ours.encode_chat(MESSAGES, tools=tools, add_generation_prompt=prompt) == ids
    if template is EVERYTHING:
        assert f"Year {datetime.now().year}" in text
        assert ids.count(0) == 1  # one BOS, the template's


def test_named_templates(tmp_path: Path) -> None:
    templates = {"default": "plain{{ messages[0].content }}", "tool_use": "{{ tools | length }} tools", "rag": "rag"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=templates)
    for folder, as_files in ((tmp_path / "files", True), (tmp_path / "config", False)):
        fast.save_pretrained(folder, save_jinja_files=as_files)
        tokenizer = load(folder)
        assert tokenizer.chat_templates == templates
        message = [{"role": "user", "content": "x"}]
        assert tokenizer.render_chat(message) == "plainx"
        assert tokenizer.render_chat(message, tools=TOOLS) == "1 tools"
        assert tokenizer.render_chat(message, chat_template="rag") == "rag"
        assert tokenizer.render_chat(message, chat_template="{{ extra }}", extra="own") == "own"


def test_chat_errors(tmp_path: Path) -> None:
    tokenizer = load(save_tokenizer(tmp_path / "none"))
    with pytest.raises(RequestError, match=r"no chat template; pass chat_template="):
        tokenizer.encode_chat(MESSAGES)
    with pytest.raises(RequestError, match="empty"):
        tokenizer.render_chat([], chat_template=CHATML)
    with pytest.raises(RequestError, match="plain JSON"):
        tokenizer.render_chat([{"role": "user", "content": object()}], chat_template=CHATML)
    nested: dict[str, Any] = {}
    for _ in range(100_000):  # deeper than JSON is written
        nested = {"a": nested}
    with pytest.raises(RequestError, match="plain JSON"):
        tokenizer.render_chat(MESSAGES, chat_template=CHATML, tools=[nested])
    with pytest.raises(RequestError, match="objects"):
        tokenizer.render_chat(["hello"], chat_template=CHATML)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="role oracle is unknown"):
        tokenizer.render_chat([{"role": "oracle", "content": ""}], chat_template=EVERYTHING)
    with pytest.raises(CheckpointError, match=r"not valid Jinja \(line 2"):
        tokenizer.render_chat(MESSAGES, chat_template="\n{% if %}")
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os }}"):
        with pytest.raises(RequestError):
            tokenizer.render_chat(MESSAGES, chat_template=attack)


def test_folder(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    tokenizer = load(save_tokenizer(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.vocab_size == 321
    assert tokenizer.encode("the") == [0, *tokenizer.encode("the", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode("the <tool é>é")) == "the <tool é>é"
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("\ud800")
    # Older layouts: special tokens as objects, or in a file of their own
    old = shutil.copytree(tmp_path, tmp_path / "old")
    (old / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|eos|>"}, "bos_token": None}))
    assert (load(old).bos_token_id, load(old).eos_token_id) == (None, 1)
    (old / "tokenizer_config.json").unlink()
    (old / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|bos|>", "eos_token": "<none>"}))
    assert (load(old).bos_token_id, load(old).eos_token_id) == (0, None)


def test_padding_and_truncation_of_training_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    text = "the quick brown fox jumps"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
        ("chat_template.jinja", "\udcff"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, text: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Tokenizer.from_folder(tmp_path)
