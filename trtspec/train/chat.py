"""Conversations as training_batches: which of their tokens are the assistant's, and windows packed with them.

A file has a JSON object on each line: {"messages": [{"role": ..., "content": ...}, ...]}, as fine-tuning data usually
has it, or ShareGPT's {"conversations": [{"from": "human" | "gpt" | "system", "value": ...}, ...]}. The target's chat
template writes the prompts. What is taught is what the assistant says, up to the token that ends its turn.
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
"""Messages as chat templates read them."""


@dataclass
class TaughtText:
    """A text's ids, and for each whether it belongs to an answer: then the row before it is taught to say it."""

    ids: list[int] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Continue by a turn, if `prompt` begins with all that there is; False if it does not."""
        if list(prompt[: len(self.ids)]) != self.ids:
            return False
        new = prompt[len(self.ids) :]
        self.ids += [*new, *answer]
        self.is_answer += [False] * len(new) + [True] * len(answer)
        return True


def add_turn(texts: list[TaughtText], prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Continue the last text by a turn. Where the template writes earlier turns in another way than they were said
    (some leave out what was thought), the turn begins a text of its own."""
    if not texts or not texts[-1].add(prompt, answer):
        texts.append(TaughtText())
        texts[-1].add(prompt, answer)


def read_chats(path: Path) -> list[Chat]:
    """The conversations of a file, in their order. ConfigError names the first line that is none."""
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
    """A conversation as it is in the data. ends: ids that end the target's turns, the one that it says first."""
    texts: list[TaughtText] = []
    for i, message in enumerate(chat):
        if message["role"] != "assistant" or i == 0:  # what is said before anybody asks has no prompt
            continue
        prompt, whole = encode(tokenizer, chat[:i], to_come=True), encode(tokenizer, chat[: i + 1], to_come=False)
        if whole[: len(prompt)] == prompt:
            answer = whole[len(prompt) :]
            last = max((place for place, token in enumerate(answer) if token in ends), default=len(answer) - 1)
            answer = answer[: last + 1]  # templates write a line break after the turn, which nobody says
        else:  # the template begins an answer that it has in another way than one that is to come
            answer = tokenizer.encode(message["content"], add_special_tokens=False) + list(ends)[:1]
        if answer:
            add_turn(texts, prompt, answer)
    return texts


def encode(tokenizer: Tokenizer, chat: Chat, to_come: bool) -> list[int]:
    """A conversation's ids by the chat template. to_come: it ends where an answer is to begin. ConfigError where the
    template refuses it."""
    try:
        return tokenizer.encode_chat(chat, add_generation_prompt=to_come)
    except RequestError as error:
        begin = chat[0]["content"] if chat else ""
        raise ConfigError(f"data: the conversation that begins with {begin!r:.60}: {error}") from error


def pack(texts: Sequence[TaughtText], seq_len: int) -> tuple[npt.NDArray[Any], int]:
    """Windows [N, seq_len] of rows (id, place, taught), each of as many whole texts as fit, the longest first; texts
    are cut at seq_len. Returns the number of answers' tokens that this loses, too.

    What is left of a window is rows of place 0, texts of their own, which nothing is taught at.
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
    """Windows as `pack` makes them: rows [N, S] of (id, place, taught)."""

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
        """Ids [M] of all answers within the windows, in their order."""
        said = np.roll(self.rows["id"], -1, axis=1)[self.rows["taught"]]
        return np.asarray(said)


def turns(chat: Chat) -> Iterator[Chat]:
    """What is said before each answer that is to be: the messages since the answer before it."""
    part: Chat = []
    for message in chat:
        if message["role"] != "assistant":
            part.append(message)
        elif part:
            yield part
            part = []
    if part and part[-1]["role"] != "system":
        yield part
