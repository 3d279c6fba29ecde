"""Training data from conversations: which tokens belong to the assistant, and windows packed with conversations.

A file has one JSON object per line. Fine-tuning data usually has the form {"messages": [{"role": ..., "content": ...},
...]}. ShareGPT has the form {"conversations": [{"from": "human" | "gpt" | "system", "value": ...}, ...]}. The target's
chat template renders the prompts. A head learns what the assistant says, up to the token that ends its turn.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trtspec.errors import ConfigError, RequestError
from trtspec.text.tokenizer import Tokenizer
from trtspec.train.training_batches import Window

SUFFIX = ".jsonl"
_SHARE_GPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ROW = np.dtype([("id", np.uint32), ("place", np.uint32), ("taught", np.bool_)])

Chat = list[dict[str, Any]]
"""Messages in the form that chat templates read."""


@dataclass
class TaughtText:
    """A text's ids, with a flag for each: whether it belongs to an answer.

    The row before an id of an answer is taught to predict it.
    """

    ids: list[int] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Append a turn if `prompt` begins with the whole text so far; return False if it does not."""
        if list(prompt[: len(self.ids)]) != self.ids:
            return False
        new = prompt[len(self.ids) :]
        self.ids += [*new, *answer]
        self.is_answer += [False] * len(new) + [True] * len(answer)
        return True


def add_turn(texts: list[TaughtText], prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Append a turn to the last text, or begin a new text with it.

    Some templates render earlier turns differently from how they were said; for example, they leave out the reasoning.
    The turn then begins a text of its own.
    """
    if not texts or not texts[-1].add(prompt, answer):
        texts.append(TaughtText())
        texts[-1].add(prompt, answer)


def read_chats(path: Path) -> list[Chat]:
    """Return the conversations of a file, in their order. ConfigError names the first line without one."""
    chats = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    chats.append(_chat(line, f"data {path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data {path} cannot be read ({error}); give a JSONL file of conversations") from error
    if not chats:
        raise ConfigError(f"data {path} holds no conversation; each line is to have one")
    return chats


def _chat(line: str, where: str) -> Chat:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error})") from error
    known = found if isinstance(found, dict) else {}
    messages = known.get("messages", known.get("conversations"))
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(
            f'{where} has no list of messages; write {{"messages": [{{"role": ..., "content": ...}}, ...]}}'
        )
    if "messages" not in known:
        messages = [{"role": _SHARE_GPT.get(str(m.get("from"))), "content": m.get("value")} for m in messages]
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ConfigError(f"{where} has the message {message!r:.120}; role and content are to be text")
    if all(message["role"] != "user" for message in messages):
        raise ConfigError(f"{where} has no message of the user; remove it")
    return messages


def taught_texts(chat: Chat, tokenizer: Tokenizer, ends: Collection[int]) -> list[TaughtText]:
    """Return the texts of a conversation, with its answers as they are in the data.

    ends: ids that end the target's turns; the first of them is the one that the target generates.
    """
    texts: list[TaughtText] = []
    for i, message in enumerate(chat):
        if message["role"] != "assistant" or i == 0:  # a message of the assistant at the beginning has no prompt
            continue
        prompt, whole = encode(tokenizer, chat[:i], to_come=True), encode(tokenizer, chat[: i + 1], to_come=False)
        if whole[: len(prompt)] == prompt:
            answer = whole[len(prompt) :]
            last = max((place for place, token in enumerate(answer) if token in ends), default=len(answer) - 1)
            answer = answer[: last + 1]  # drops the line break that templates write after a turn
        else:  # the template begins a given answer differently from one that is to come
            answer = tokenizer.encode(message["content"], add_special_tokens=False) + list(ends)[:1]
        if answer:
            add_turn(texts, prompt, answer)
    return texts


def encode(tokenizer: Tokenizer, chat: Chat, to_come: bool) -> list[int]:
    """Return a conversation's ids, rendered by the chat template. ConfigError if the template refuses it.

    to_come: whether the ids end where the next answer begins.
    """
    try:
        return tokenizer.encode_chat(chat, add_generation_prompt=to_come)
    except RequestError as error:
        begin = chat[0]["content"] if chat else ""
        raise ConfigError(f"data: the conversation that begins with {begin!r:.60}: {error}") from error


def pack(texts: Sequence[TaughtText], seq_len: int) -> tuple[npt.NDArray[Any], int]:
    """Pack texts into windows [N, seq_len] of rows (id, place, taught); also return the number of answer tokens lost.

    Each window holds as many whole texts as fit; the longest texts are placed first. Texts are cut at seq_len, and the
    answer tokens after the cut are lost.

    The rest of a window is rows of place 0. Each of them is a text of its own, and none is taught.
    """
    windows: list[list[TaughtText]] = []
    room: list[tuple[int, int]] = []  # (rows left, window), ascending
    for text in sorted(texts, key=lambda text: -len(text.ids)):
        size = min(len(text.ids), seq_len)
        at = bisect.bisect_left(room, (size, -1))
        left, window = room.pop(at) if at < len(room) else (seq_len, len(windows))
        if window == len(windows):
            windows.append([])
        windows[window].append(text)
        if left > size:
            bisect.insort(room, (left - size, window))
    packed = np.zeros((len(windows), seq_len), dtype=_ROW)
    lost = 0
    for row, parts in zip(packed, windows, strict=True):
        start = 0
        for text in parts:
            size = min(len(text.ids), seq_len)
            rows = row[start : start + size]
            rows["id"], rows["place"] = text.ids[:size], np.arange(size)
            rows["taught"][:-1] = text.is_answer[1:size]
            lost += sum(text.is_answer[size:])
            start += size
    return packed, lost


@dataclass(frozen=True)
class PackedWindows:
    """A sequence of windows as `pack` makes them: rows [N, S] of (id, place, taught)."""

    rows: npt.NDArray[Any]

    @property
    def seq_len(self) -> int:
        return int(self.rows.shape[1])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Window:
        row = self.rows[index]
        ids, places = (torch.from_numpy(row[name].astype(np.int64)) for name in ("id", "place"))
        return Window(ids, places, torch.from_numpy(row["taught"].copy()))

    def answers(self) -> npt.NDArray[Any]:
        """Return the ids [M] of all answers within the windows, in their order."""
        said = np.roll(self.rows["id"], -1, axis=1)[self.rows["taught"]]
        return np.asarray(said)


def turns(chat: Chat) -> Iterator[Chat]:
    """Yield the messages before each answer that is to be generated: those since the previous answer."""
    part: Chat = []
    for message in chat:
        if message["role"] != "assistant":
            part.append(message)
        elif part:
            yield part
            part = []
    if part and part[-1]["role"] != "system":
        yield part
