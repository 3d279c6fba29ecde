"""The shipped head was not trained on the texts with which it is measured.

No run of 13 words of HumanEval's prompts or solutions, nor of the held-out questions, is in its training. The tests
search in another way than the training itself does. Prompts are made again; answers are those of the last training on
this machine, if there was one.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not os.environ.get("TRTSPEC_SMOLLM2"), reason="needs packages that `make contract-smollm2` downloads"
)


def runs_of(text: str) -> set[str]:
    words = re.sub(r"[^a-z0-9_]+", " ", text.lower()).split()
    return {" ".join(words[i : i + 13]) for i in range(len(words) - 12)}


@pytest.fixture(scope="module")
def held_out() -> set[str]:
    from examples.smollm2.__main__ import QUESTIONS
    from examples.smollm2.sources import human_eval

    questions = [json.loads(line)["messages"][0]["content"] for line in QUESTIONS.read_text().splitlines()]
    problems = human_eval()
    assert len(problems) == 164
    texts = [*questions, *(one.prompt for one in problems), *(one.solution for one in problems)]
    return set().union(*map(runs_of, texts))


def test_no_prompt_has_what_is_held_out(held_out: set[str], tmp_path: Path) -> None:
    from examples.smollm2.__main__ import CONVERSATIONS
    from examples.smollm2.overlap import Grams
    from examples.smollm2.prompts import write

    file = tmp_path / "prompts.jsonl"
    write(file, CONVERSATIONS, Grams([]))  # including those that the training would leave out
    chats = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert len(chats) == CONVERSATIONS
    assert sum("```" in chat[0]["content"] or "def " in chat[0]["content"] for chat in chats) > CONVERSATIONS / 4
    assert not [chat[0]["content"] for chat in chats if runs_of(chat[0]["content"]) & held_out]


def test_no_answer_has_what_is_held_out(held_out: set[str]) -> None:
    from examples.smollm2.sources import FOLDER, model_file
    from trtspec.methods.hidden_states.shards import ShardReader, shards_of
    from trtspec.text.tokenizer import Tokenizer

    readers = [ShardReader(shard) for shard in shards_of(FOLDER / "states")]
    if not readers:
        pytest.skip("no head was trained on this machine: make smollm2 ARGS=--train")
    tokenizer = Tokenizer.from_folder(model_file())
    assert tokenizer is not None
    texts = (tokenizer.decode(part.tolist()) for one in readers for part in one.ids().split(one.lengths))
    assert not [text for text in texts if runs_of(text) & held_out]
