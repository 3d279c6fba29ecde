"""The target's own words, by the engine that serves them: many prompts at once, kept in pieces, so that a run that was
stopped goes on."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from typing_extensions import Self

from trtspec.errors import EngineError
from trtspec.llm import LLM
from trtspec.sampling_params import SamplingParams
from trtspec.text.tokenizer import Tokenizer
from trtspec.train.chat import Chat, TaughtText, add_turn, encode, turns
from trtspec.train.checkpoint import write_atomically
from trtspec.train.report import Report

BATCH = 64
"""Prompts in one step."""
_PIECE = 2 * BATCH  # prompts

logger = logging.getLogger(__name__)


class Words(NamedTuple):
    """Tokens that the target said; ended: it ended its turn, which is the last of them."""

    ids: list[int]
    ended: bool


@dataclass(frozen=True)
class Manner:
    """How the target speaks. temperature 0 is greedy; else prompt i of a call is seeded by `seed` and i. ignore_eos:
    ends of text are tokens like any other."""

    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    def params(self, max_tokens: int, *of: int) -> SamplingParams:
        """For the prompt that `of` numbers."""
        seed = self.seed
        for number in of:
            seed = (seed * 1_000_003 + number + 1) % 2**63
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            seed=seed if self.temperature else None,
        )


class Speaker:
    """The target in its engine, which starts when something is missing in `folder`; the folder belongs to this model
    alone. Used with `with`.

    max_seq_len: of prompts with what is said. Raises what LLM raises for the model.
    """

    def __init__(self, model: Path, folder: Path, max_seq_len: int) -> None:
        self.model, self.folder, self.max_seq_len = model, folder, max_seq_len
        self._llm: LLM | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._llm is not None:
            self._llm.shutdown()

    def say(self, label: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Words]:
        """What the target says to each. label: of the report."""
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = [slice(start, start + _PIECE) for start in range(0, len(prompts), _PIECE)]
        pieces = [self.folder / f"{_digest(prompts[part], params[part])}.json" for part in parts]
        missing = [i for i, piece in enumerate(pieces) if not piece.is_file()]
        if missing:
            llm = self._engine(len(prompts))
            with Report(f"regenerating {label}") as report:
                begin, made = time.monotonic(), 0
                report.at(0.0, f"{len(prompts):,} prompts")
                for done, i in enumerate(missing, 1):
                    some = [list(prompt) for prompt in prompts[parts[i]]]
                    outputs = [output.outputs[0] for output in llm.generate(some, params[parts[i]], use_tqdm=False)]
                    if failed := next((one.error for one in outputs if one.error), None):
                        raise EngineError(f"regenerating {label}: {failed}")
                    words = [Words(list(one.token_ids), one.finish_reason == "stop") for one in outputs]
                    write_atomically(pieces[i], json.dumps(words).encode())
                    made += sum(len(one.ids) for one in words)
                    speed = made / (time.monotonic() - begin)
                    report.at(done / len(missing), f"{made:,} tokens · {speed:,.0f} tok/s")
        return [Words(*words) for piece in pieces for words in json.loads(piece.read_text(encoding="utf-8"))]

    def _engine(self, prompts: int) -> LLM:
        if self._llm is None:
            batch = min(BATCH, prompts)
            self._llm = LLM(self.model, max_batch_size=batch, max_seq_len=self.max_seq_len, generation_config="off")
        return self._llm


def answer_chats(
    speaker: Speaker, chats: Sequence[Chat], tokenizer: Tokenizer, room: int, new_tokens: int, manner: Manner
) -> list[TaughtText]:
    """The conversations with the target's own answers, each of up to `new_tokens`, in the place of those that they
    have. One that becomes longer than `room`, or whose last answer does not end, ends there.

    ConfigError where the chat template refuses one.
    """
    parts = [list(turns(chat)) for chat in chats]
    said: list[Chat] = [[] for _ in chats]
    texts: list[list[TaughtText]] = [[] for _ in chats]
    going, turn = list(range(len(chats))), 0
    while going:
        prompts, open_chats = [], []
        for i in going:
            said[i] += parts[i][turn]
            prompt = encode(tokenizer, said[i], to_come=True)
            if len(prompt) < room:
                prompts.append(prompt)
                open_chats.append(i)
        params = [
            manner.params(min(new_tokens, room - len(prompt)), i, turn)
            for i, prompt in zip(open_chats, prompts, strict=True)
        ]
        answers = speaker.say(f"turn {turn + 1}", prompts, params) if prompts else []
        going = []
        for i, prompt, words in zip(open_chats, prompts, answers, strict=True):
            add_turn(texts[i], prompt, words.ids)
            said[i].append({"role": "assistant", "content": tokenizer.decode(words.ids)})
            if words.ended and turn + 1 < len(parts[i]):
                going.append(i)
        turn += 1
    if silent := sum(not own for own in texts):
        logger.warning(
            "%d of %d conversations begin with more than %d tokens and are not used; raise seq_len",
            silent, len(chats), room,
        )  # fmt: skip
    return [text for own in texts for text in own]


def _digest(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> str:
    """A name for what is asked for: 32 hexadecimal digits."""
    asked = [[list(prompt), repr(own)] for prompt, own in zip(prompts, params, strict=True)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]


def forget(folder: Path) -> None:
    """Delete what a Speaker kept in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
