"""Tokenizer folders: chat templates as transformers renders them, data read from files, and errors that name damage."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.unit.tokenizer_kinds import byte_level
from trtspec.errors import CheckpointError, RequestError
from trtspec.text import Tokenizer

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


def test_messages_as_clients_send_them(tmp_path: Path) -> None:
    """Templates read one text, and arguments as an object. Clients send parts, and arguments as JSON."""
    tokenizer = load(save_tokenizer(tmp_path / "none"))
    template = "{% for m in messages %}{{ m.content }}|{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
    message = {"role": "assistant", "content": parts, "tool_calls": [call]}
    assert tokenizer.render_chat([message], chat_template=template) == "one\ntwo|Oslo"
    with pytest.raises(RequestError, match="content must be text, or parts of text"):
        tokenizer.render_chat([{"role": "user", "content": [{"type": "image_url"}]}], chat_template=template)
    call["function"] = {"name": "f", "arguments": "{"}
    with pytest.raises(RequestError, match="arguments are not JSON"):
        tokenizer.render_chat([message], chat_template=template)


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
    by_file = Tokenizer.named(tmp_path / "tokenizer.json")
    assert (by_file.bos_token_id, by_file.eos_token_id, by_file.name) == (0, 1, str(tmp_path))
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
