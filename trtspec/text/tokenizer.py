"""A checkpoint's tokenizer and chat templates."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import CheckpointError, RequestError
from trtspec.hub.folders import checkpoint_folder

if TYPE_CHECKING:
    import tokenizers  # at run time only if there is a tokenizer.json: it is the largest import after torch

Message = Mapping[str, Any]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
# GPT-2's spelling of bytes: printable ones stand for themselves, the others are the characters from U+0100 on
_BYTES = {chr(byte): bytes([byte]) for byte in _PRINTABLE} | {
    chr(256 + i): bytes([byte]) for i, byte in enumerate(sorted(set(range(256)).difference(_PRINTABLE)))
}


class Tokenizer:
    """A checkpoint's tokenizer.json, together with the special tokens and chat templates of its folder.

    Token ids are ints in [0, vocab_size). Instances hold no request state and may be shared between threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        name: str = "tokenizer",
    ) -> None:
        """special_tokens: name, such as "eos_token" -> text. chat_templates: name -> Jinja source."""
        # A tokenizer.json may carry the padding and truncation of its training run; here they would lose text
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        added_tokens = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added_tokens)
        self._special_ids = frozenset(token for token, added in added_tokens.items() if added.special)
        decoder = backend.decoder  # its state is its part of tokenizer.json; to_str() would include the vocabulary
        state = b"" if decoder is None else decoder.__getstate__()
        self._has_byte_fallback = b'"ByteFallback"' in state
        self._is_byte_level = b'"ByteLevel"' in state
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer | None:
        """Tokenizer of a checkpoint folder; None if there is no tokenizer.json (token ids only).

        Raises CheckpointError naming the file that is damaged.
        """
        file = checkpoint_folder(path) / "tokenizer.json"
        return cls._from_file(file) if file.is_file() else None

    @classmethod
    def _from_file(cls, file: Path) -> Tokenizer:
        """Tokenizer of a tokenizer.json and the files next to it."""
        folder = file.parent
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{file} is not a readable tokenizer ({error}); download the file again") from error
        config = _read_object(folder / "tokenizer_config.json")
        # Older folders keep the special tokens in a file of their own
        named = {**_read_object(folder / "special_tokens_map.json"), **config}
        special = {key: text for key, value in named.items() if key.endswith("_token") and (text := _token_text(value))}
        return cls(backend, special, _chat_templates(folder, config), str(folder))

    @classmethod
    def named(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Tokenizer that the user asks for by the path of a folder or a tokenizer.json.

        CheckpointError if there is none.
        """
        is_file = Path(path).suffix == ".json" and Path(path).is_file()
        tokenizer = cls._from_file(Path(path)) if is_file else cls.from_folder(path)
        if tokenizer is None:
            raise CheckpointError(f"tokenizer {str(path)!r} has no tokenizer.json; name a folder or file that has")
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def vocabulary(self) -> dict[str, int]:
        """Each token as the tokenizer spells it -> its id."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def spelling(self) -> str:
        """The tokenizer's spelling of tokens: "byte_level", "byte_fallback" or "raw".

        "byte_level" has a character for each byte. "byte_fallback" has a marker for a blank, and <0x0A> for a byte that
        is no character. "raw" is the token's text.
        """
        return "byte_level" if self._is_byte_level else "byte_fallback" if self._has_byte_fallback else "raw"

    def spelled(self, size: int) -> list[str]:
        """Spellings of ids 0 .. size - 1; "" for ids that are no text: special tokens, and ids that do not exist."""
        found = [""] * size
        for text, token in self.vocabulary.items():
            if token < size and token not in self._special_ids:
                found[token] = text
        return found

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """End-of-sequence id by tokenizer_config.json; a checkpoint's other files may name more."""
        return self._special_id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        """Id that stands for text without a token."""
        return self._special_id("unk_token")

    def token(self, token_id: int) -> str | None:
        """Spelling of a token in the tokenizer; None if there is no such id."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for inside a text, in UTF-8; a token may be a part of a character."""
        text = self._backend.id_to_token(token_id)
        if text is None or token_id in self._added_ids or not (self._is_byte_level or self._has_byte_fallback):
            return self.decode([token_id], skip_special_tokens=False).encode()
        if self._is_byte_level:
            return b"".join([_BYTES.get(c, c.encode()) for c in text])
        if self.is_byte_token(token_id):
            return bytes([int(text[3:-1], 16)])
        return text.replace("\u2581", " ").encode()

    def token_id(self, text: str) -> int | None:
        """Id of the token with this spelling; None if there is none."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def is_special(self, token: int) -> bool:
        """Whether a text leaves out this token unless special tokens are to be kept."""
        return token in self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Other threads run meanwhile. RequestError if `text` is not valid Unicode text."""
        try:
            # the library's encode() would hold the interpreter's lock, for a second if the text is a megabyte
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except (TypeError, UnicodeError) as error:
            raise RequestError(
                f"prompt {text!r:.80} is not valid Unicode text ({error}); pass a str without lone surrogates"
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids. Ids outside the vocabulary decode to nothing, incomplete UTF-8 to U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def render_chat(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Prompt text of a conversation, as transformers' apply_chat_template renders it.

        chat_template: the name of one of the checkpoint's templates, or Jinja source. tools: JSON schemas. The template
        receives further keywords. Raises RequestError for messages that are not plain JSON, for a conversation that the
        template refuses, and if there is no template.
        """
        from trtspec.text import chat_template as templates  # only chat imports Jinja

        if not messages:
            raise RequestError("the conversation is empty; pass at least one message, as {'role': ..., 'content': ...}")
        source = self._template_source(chat_template, bool(tools))
        # The template is foreign code: it gets plain JSON values, never our callers' objects. Keys whose value is None
        # are dropped because templates would print them (transformers does the same).
        chat = _plain("messages", list(messages))
        if not all(isinstance(message, dict) for message in chat):
            raise RequestError("messages must be objects, as {'role': ..., 'content': ...}")
        chat = [_as_templates_read(message) for message in chat]
        values: dict[str, Any] = {**self.special_tokens, **template_kwargs}
        values["messages"] = [{k: v for k, v in message.items() if v is not None} for message in chat]
        values["tools"] = None if tools is None else _plain("tools", list(tools))
        values.setdefault("documents", None)
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return templates.compile_template(source).render(values)
        except templates.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template of {self.name} is not valid Jinja (line {error.lineno}: {error}); "
                "correct it or pass chat_template="
            ) from error
        except Exception as error:  # any error of a template concerns this request alone
            raise RequestError(
                f"the chat template of {self.name} refuses this conversation: {error}; change the messages or pass "
                "chat_template="
            ) from error

    def encode_chat(self, messages: Sequence[Message], /, **options: Any) -> list[int]:
        """Token ids of `render_chat(messages, **options)`. The template writes BOS itself, so none is added."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def is_visible(self, token: int, skip_special_tokens: bool) -> bool:
        """Whether decode uses this id: not if the tokenizer does not have it, nor if it is special and skipped."""
        if skip_special_tokens and token in self._special_ids:
            return False
        return self._backend.id_to_token(token) is not None

    def is_byte_token(self, token: int) -> bool:
        """Whether this id is one raw byte of a run that can only be decoded as a whole (byte fallback)."""
        return self._has_byte_fallback and _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token) or "") is not None

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    def _template_source(self, wanted: str | None, with_tools: bool) -> str:
        if wanted is not None:
            return self.chat_templates.get(wanted, wanted)
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self.chat_templates:
                return self.chat_templates[name]
        if self.chat_templates:
            raise RequestError(
                f"{self.name} has no default chat template; pass chat_template= one of {', '.join(self.chat_templates)}"
            )
        raise RequestError(
            f"{self.name} has no chat template; pass chat_template= (Jinja source), or use generate() with a prompt"
        )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not readable text ({error}); download the file again") from error


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    text = _read_text(file)
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{file} is not readable JSON ({error}); download the file again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} holds a {type(data).__name__}, not an object; download the file again")
    return data


def _as_templates_read(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one text, and arguments of tool calls as objects. RequestError otherwise."""
    parts, calls = message.get("content"), message.get("tool_calls")
    if isinstance(parts, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise RequestError("a message's content must be text, or parts of text as {'type': 'text', 'text': ...}")
        message = {**message, "content": "\n".join(part["text"] for part in parts)}
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_with_arguments(call) for call in calls]}
    return message


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a tool call's arguments are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _token_text(value: Any) -> str | None:
    """Text of a special token, which is written as text or as {"content": text, ...}; None for anything else."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> source of the chat templates of a folder.

    Template files take precedence over tokenizer_config.json, which holds one template or a list of named ones.
    """
    files = {"default": folder / "chat_template.jinja"}
    files.update({file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))})
    templates = {name: _read_text(file) for name, file in files.items() if file.is_file()}
    if templates:
        return templates
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: field 'chat_template' is neither a string nor a list of "
            "{name, template}; correct it in the file"
        ) from error


def _plain(what: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} must be plain JSON values (str, numbers, lists, objects): {error}") from error
