"""Fields of SamplingParams from a Triton request's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trtspec.errors import RequestError
from trtspec.serve.triton.tensors import Values
from trtspec.text import Tokenizer

_PART = "\ufffd"  # text of tokens that are only a part of a character


def sampling_params(values: Values, fields: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of SamplingParams from the tensors that are present. fields: tensor -> field."""
    return {name: values[tensor][0] for tensor, name in fields.items() if tensor in values}


def stop_fields(tokenizer: Tokenizer, words: Iterable[tuple[str, Sequence[int]]]) -> dict[str, list[Any]]:
    """Fields of SamplingParams that make words end a text. words: each word with its token ids.

    A word ends the text where the word begins, however its letters are tokenized. A special token, which no text shows,
    ends the text by its id, and so does a token that is a part of a character. RequestError for such a token in a word
    of several tokens.
    """
    fields: dict[str, list[Any]] = {"stop": [], "stop_token_ids": []}
    for word, ids in words:
        if _PART not in word and all(tokenizer.is_visible(token, skip_special_tokens=True) for token in ids):
            fields["stop"].append(word)
        elif len(ids) == 1:
            fields["stop_token_ids"] += ids
        else:
            raise RequestError(
                f"stop word {word!r} (token ids {list(ids)}) mixes a special token, or a part of a character, with "
                "others; give that one alone"
            )
    return fields
