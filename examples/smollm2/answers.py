"""What the target answers to the prompts: the text that the head learns from."""

from __future__ import annotations

import json
from pathlib import Path

from examples.smollm2.overlap import Grams
from examples.smollm2.prompts import Chat
from trtspec import LLM, SamplingParams
from trtspec.errors import EngineError
from trtspec.train.report import Report

LENGTH = 320  # tokens of an answer, at most
TEMPERATURES = (0.0, 0.8)
"""Of conversations in turn."""
_PIECE = 512  # conversations, kept when all are answered
_BATCH = 128


def answer(model: Path, prompts: Path, answers: Path, held_out: Grams) -> int:
    """Answer the conversations of `prompts` in JSONL, and write them with their answers to `answers`; a killed run goes
    on. What shares words with `held_out` is left out; returns how many these are."""
    asked = _read(prompts)
    part = answers.with_suffix(".part")
    said = _read(part) if part.is_file() else []
    if len(said) < len(asked):
        with (
            Report("answering") as report,
            LLM(model, max_batch_size=_BATCH, max_seq_len=1024, generation_config="off") as llm,
            open(part, "a", encoding="utf-8") as file,
        ):
            while len(said) < len(asked):
                report.at(len(said) / len(asked), f"{len(asked):,} conversations")
                some = _answered(llm, asked[len(said) : len(said) + _PIECE], len(said))
                file.write("".join(map(_line, some)))
                file.flush()
                said += some
    kept = [chat for chat in said if not any(held_out.overlaps(message["content"]) for message in chat)]
    answers.write_text("".join(map(_line, kept)), encoding="utf-8")
    return len(said) - len(kept)


def _answered(llm: LLM, chats: list[Chat], first: int) -> list[Chat]:
    """Turn by turn, as far as the answers end; first: the number of the first conversation."""
    questions = [[message for message in chat if message["role"] == "user"] for chat in chats]
    said: list[Chat] = [[] for _ in chats]
    going = list(range(len(chats)))
    for turn in range(max(map(len, questions))):
        going = [i for i in going if turn < len(questions[i])]
        for i in going:
            said[i].append(questions[i][turn])
        params = [_params(first + i) for i in going]
        outputs = (
            [own.outputs[0] for own in llm.chat([said[i] for i in going], params, use_tqdm=False)] if going else []
        )
        for i, output in zip(going, outputs, strict=True):
            if output.error:
                raise EngineError(f"conversation {first + i}: {output.error}")
            said[i].append({"role": "assistant", "content": output.text})
        going = [i for i, output in zip(going, outputs, strict=True) if output.finish_reason == "stop"]
    return said


def _params(number: int) -> SamplingParams:
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    return SamplingParams(temperature=temperature, seed=number if temperature else None, max_tokens=LENGTH)


def _read(file: Path) -> list[Chat]:
    return [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]


def _line(chat: Chat) -> str:
    return json.dumps({"messages": chat}) + "\n"
