"""Training data of the assistant's head: prompts of two kinds, and nothing that the head is measured with."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from examples.smollm2 import answers, prompts
from examples.smollm2.__main__ import questions
from examples.smollm2.overlap import SIZE, Grams
from examples.smollm2.prompts import Chat
from trtspec import LLM, SamplingParams
from trtspec.methods.hidden_states.shards import ShardReader, shards_of
from trtspec.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "examples" / "demo"
WORDS = [f"word{i}" for i in range(40)]
PROBLEM = '''def total(numbers, start):
    """Return the sum of all given numbers, added one by one to the start value, as a float."""
'''
SOURCE = '''
import os
from functools import cache


def total(numbers, start):
    """Return the sum of all given numbers, added one by one to the start value, as a float."""
    for number in numbers:
        start += number
    return float(start)


def parsed(text: str, base: int = 10) -> list[int]:
    """
    Read the numbers that are in a text. Signs belong to them.

    >>> parsed("1 and -2")
    [1, -2]

    Parameters
    ----------
    text : str
    """
    return [int(word, base) for word in text.split()]


@cache
def decorated(value):
    """Is left out, as what a decorator does is not to be seen."""


def _hidden(value):
    """Is left out, as it belongs to nobody else's program."""


def undocumented(value):
    return value


def later(value):
    """Give back the value that came first, after all the others.

    :param value: what to wait for
    """
    return value
'''


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def files() -> Iterator[tuple[str, str]]:
        yield "one/broken.py", "def ("
        yield "one/some.py", SOURCE
        yield "two/again.py", SOURCE
        functions = (
            f'def f{i}(a, b):\n    """Give the larger one of {i} and the product of both arguments."""\n'
            f"    return max({i}, a * b)\n\n\n"
            for i in range(60)
        )
        yield "two/many.py", "".join(functions)

    monkeypatch.setattr(prompts, "python_files", files)


def test_thirteen_words_in_a_row_are_an_overlap() -> None:
    grams = Grams([" ".join(WORDS)])
    assert grams.overlaps("And so: " + ", ".join(WORDS[7 : 7 + SIZE]).upper() + "!")
    assert not grams.overlaps(" ".join(WORDS[7 : 7 + SIZE - 1]) + " and so on, for as many words as there are at all")
    assert Grams(["Four words are few."]).overlaps("four words: are few")
    assert not Grams(["Four words are few."]).overlaps("four words are few but more follow")


def test_functions_are_documented_ones_with_the_first_part_of_their_docstrings(packages: None) -> None:
    found = {one.name: one for one in prompts.functions()}
    assert list(found)[:3] == ["total", "parsed", "later"]
    assert len(found) == 63
    assert found["total"].head == PROBLEM
    assert found["parsed"].head == (
        'def parsed(text: str, base: int=10) -> list[int]:\n    """Read the numbers that are in a text. '
        'Signs belong to them.\n\n    >>> parsed("1 and -2")\n    [1, -2]\n    """\n'
    )
    assert found["parsed"].summary == "Read the numbers that are in a text"
    assert "Read the numbers" not in found["parsed"].source
    assert "return [int(word, base)" in found["parsed"].source
    assert ":param" not in found["later"].head
    for one in found.values():
        compile(one.head, one.name, "exec")
        compile(one.source, one.name, "exec")


def test_half_of_the_prompts_are_of_code_and_none_is_held_out(packages: None, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "prompts.jsonl"
    left_out = prompts.write(file, 200, Grams([PROBLEM]))
    assert left_out[0] > 0
    chats = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    texts = [chat[0]["content"] for chat in chats]
    assert len(texts) == len(set(texts)) == 200
    assert not any(Grams([PROBLEM]).overlaps(text) for text in texts)
    rng = random.Random(0)
    code = {chat[0]["content"] for chat in prompts.code_chats(rng, 600)}
    assert sum(text in code for text in texts) == 100
    assert {len(chat) for chat in chats} == {1, 3}
    again = tmp_path / "again.jsonl"
    prompts.write(again, 200, Grams([PROBLEM]))
    assert again.read_bytes() == file.read_bytes()
    prompts.write(again, 200, Grams([PROBLEM]), seed=1)
    assert again.read_bytes() != file.read_bytes()


def test_held_out_questions_are_asked_nowhere_in_training() -> None:
    held_out = Grams(questions())
    asked = [chat[0]["content"] for chat in prompts.other_chats(random.Random(0), 20_000)]
    assert len(questions()) == 64
    assert not set(questions()) & set(asked)
    assert not any(held_out.overlaps(text) for text in asked)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers") / "target"
    shutil.copytree(DEMO / "target", folder)
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_answers_are_the_models_own_and_go_on_where_they_were_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def engine(*args: object, **options: object) -> LLM:
        started.append(args)
        return LLM(*args, **options, backend="eager")  # type: ignore[arg-type]

    monkeypatch.setattr(answers, "LLM", engine)
    monkeypatch.setattr(answers, "_PIECE", 4)
    monkeypatch.setattr(answers, "_PER_FILE", 3)
    monkeypatch.setattr(answers, "LENGTH", 12)
    asked = [[{"role": "user", "content": f"def f{i}(self):"}] for i in range(10)]
    asked[0] += [{"role": "assistant", "content": ""}, {"role": "user", "content": "pass"}]
    file, states = tmp_path / "prompts.jsonl", tmp_path / "states"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in asked))
    tokenizer = Tokenizer.from_folder(model)
    assert tokenizer is not None

    def said() -> list[str]:
        readers = [ShardReader(shard) for shard in shards_of(states)]
        assert {reader.metadata.capture_layers for reader in readers} <= {(0, 2)}
        return sorted(tokenizer.decode(ids) for reader in readers for ids in answers._requests(reader))

    assert answers.answer(model, file, (0, 2), states, Grams([])) == 0
    wanted = []
    with LLM(model, backend="eager") as llm:
        for i, chat in enumerate(asked):
            params = SamplingParams(temperature=0.8 if i % 2 else 0, seed=i if i % 2 else None, max_tokens=12)
            [output] = llm.chat(chat[:1], params, use_tqdm=False)
            wanted.append(tokenizer.decode([*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]))
    assert said() == sorted(wanted)

    for shard in shards_of(states)[2:]:
        shard.unlink()
    assert answers.answer(model, file, (0, 2), states, Grams([wanted[5]])) == 1
    assert said() == sorted(wanted[:5] + wanted[6:])
    assert len(started) == 2
    asked.pop(5)
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in asked))
    assert answers.answer(model, file, (0, 2), states, Grams([])) == 0
    assert len(started) == 2  # nothing was missing


def test_a_second_question_is_asked_where_the_first_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second question is asked only where the first answer ends.

    The engine has fixed answers, as the tiny model never ends one.
    """

    class Engine:
        heard: ClassVar[list[list[str]]] = []

        def chat(self, chats: list[Chat], params: list[SamplingParams], use_tqdm: bool) -> list[object]:
            self.heard += [[message["content"] for message in chat] for chat in chats]
            ends = ["length" if chat[0]["content"] == "long" else "stop" for chat in chats]
            outputs = (SimpleNamespace(text="so", error=None, finish_reason=end) for end in ends)
            return [SimpleNamespace(outputs=[output]) for output in outputs]

    def ask(*questions: str) -> Chat:
        return [{"role": role, "content": text} for text in questions for role in ("user", "assistant")][:-1]

    answers._answer(Engine(), {3: ask("one"), 5: ask("two", "more"), 7: ask("long", "more")})  # type: ignore[arg-type]
    assert Engine.heard == [["one"], ["two"], ["long"], ["two", "so", "more"]]
