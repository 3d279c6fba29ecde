"""The target's answers to the prompts, and its hidden states: the data that the head learns from."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from examples.smollm2.overlap import Grams
from examples.smollm2.prompts import Chat
from trtspec import LLM, SamplingParams
from trtspec.errors import EngineError
from trtspec.methods.hidden_states.shards import ShardReader, shards_of, write_shard
from trtspec.text.tokenizer import Tokenizer
from trtspec.train.chat import encode
from trtspec.train.report import Report

LENGTH = 256  # largest number of tokens of an answer
TEMPERATURES = (0.0, 0.8)
"""Temperatures that the conversations have in turn."""
_PIECE = 1024  # conversations at a time; second questions follow when all first ones are answered
_BATCH = 128
_PER_FILE = 256  # requests; a killed run loses those of a file that is not full yet


def answer(model: Path, prompts: Path, layers: Sequence[int], states: Path, held_out: Grams) -> int:
    """Answer the conversations of `prompts` in JSONL, and write shards of the target's hidden states after `layers`.

    The shards go to the folder `states`. A killed run goes on where it was. Requests that share words with `held_out`
    are left out; the function returns their number.
    """
    tokenizer = Tokenizer.from_folder(model)
    assert tokenizer is not None
    asked = [json.loads(line)["messages"] for line in prompts.read_text(encoding="utf-8").splitlines()]
    there = sorted(ids for shard in shards_of(states) for ids in _requests(ShardReader(shard)))
    left = [i for i, chat in enumerate(asked) if not _begins_one(encode(tokenizer, chat[:1], to_come=True), there)]
    if left:
        saving = {
            "method": "extract_hidden_states",
            "output_directory": str(states),
            "write_interval": _PER_FILE,
            "capture_layers": tuple(layers),
        }
        with (
            Report("answering") as report,
            LLM(
                model,
                max_batch_size=_BATCH,
                max_seq_len=1024,
                generation_config="off",
                speculative_config=saving,
            ) as llm,
        ):
            for start in range(0, len(left), _PIECE):
                report.at(start / len(left), f"{len(left):,} conversations")
                _answer(llm, {i: asked[i] for i in left[start : start + _PIECE]})
    return sum(_filter(shard, tokenizer, held_out) for shard in shards_of(states))


def _answer(llm: LLM, chats: dict[int, Chat]) -> None:
    """Answer conversations turn by turn; one goes on only if its last answer has ended. chats: by number."""
    questions = {i: [message for message in chat if message["role"] == "user"] for i, chat in chats.items()}
    said: dict[int, Chat] = {i: [] for i in chats}
    going = list(chats)
    for turn in range(max(map(len, questions.values()))):
        going = [i for i in going if turn < len(questions[i])]
        for i in going:
            said[i].append(questions[i][turn])
        if not going:
            return
        outputs = llm.chat([said[i] for i in going], [_params(i) for i in going], use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        for i, one in zip(going, answers, strict=True):
            if one.error:
                raise EngineError(f"conversation {i}: {one.error}")
            said[i].append({"role": "assistant", "content": one.text})
        going = [i for i, one in zip(going, answers, strict=True) if one.finish_reason == "stop"]


def _params(number: int) -> SamplingParams:
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    return SamplingParams(temperature=temperature, seed=number if temperature else None, max_tokens=LENGTH)


def _requests(shard: ShardReader) -> list[list[int]]:
    """Ids of each request of a shard."""
    return [part.tolist() for part in shard.ids().split(shard.lengths)]


def _begins_one(prompt: list[int], texts: list[list[int]]) -> bool:
    """Whether a text begins with `prompt`. texts: sorted."""
    place = bisect_left(texts, prompt)
    return place < len(texts) and texts[place][: len(prompt)] == prompt


def _filter(shard: Path, tokenizer: Tokenizer, held_out: Grams) -> int:
    """Remove requests that share words with `held_out`; returns their number."""
    reader = ShardReader(shard)
    clean = [i for i, ids in enumerate(_requests(reader)) if not held_out.overlaps(tokenizer.decode(ids))]
    lost = len(reader.lengths) - len(clean)
    if lost:
        write_shard(shard, reader.metadata, [reader.rows(i, 0, reader.lengths[i]) for i in clean])
    return lost
