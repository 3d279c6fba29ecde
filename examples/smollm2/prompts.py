"""Prompts of the head's training, which the target answers: half of them about code, half about everything else.

Code tasks are made from functions of packages under free licences (sources.PACKAGES) and from tasks written here. The
rest is made from tasks and subjects written here. Prompts that share a run of 13 words with HumanEval, or with the
held-out questions, are left out (overlap.py).
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from examples.smollm2.overlap import Grams
from examples.smollm2.sources import python_files
from examples.smollm2.subjects import (
    ABOUT_SUBJECTS,
    AGAIN,
    CODE_SUBJECTS,
    CODE_TASKS,
    LANGUAGES,
    PAIRS,
    PEOPLE,
    PLACES,
    SUBJECTS,
)

Chat = list[dict[str, str]]

COMPLETE = "Complete this Python function:\n\n```python\n{}\n```"
"""The wording that benchmarks use, too; most code tasks have one of the other wordings."""

_COMPLETE = (
    COMPLETE,
    "Write the body of this function.\n\n```python\n{}\n```",
    "Implement the following Python function:\n\n```python\n{}\n```",
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    "```python\n{}\n```",
    "{}",
    "Finish this code:\n{}",
)
_OF_SOURCE = (
    "Explain what this code does:\n\n```python\n{}\n```",
    "Write unit tests for this function:\n\n```python\n{}\n```",
    "How could this function be made better?\n\n```python\n{}\n```",
    "Rewrite this function so that it is easier to read:\n\n```python\n{}\n```",
    "Is there a bug in this code?\n\n```python\n{}\n```",
    "Translate this Python function into {language}:\n\n```python\n{source}\n```",
)
_MAX_HEAD, _MAX_SOURCE = 700, 900  # characters


class Function(NamedTuple):
    """A function.

    head: its signature with its docstring. summary: the docstring's first sentence. source: the whole function without
    the docstring.
    """

    name: str
    head: str
    summary: str
    source: str


def functions() -> list[Function]:
    """Documented functions of the packages, each once, in an order that does not depend on the machine."""
    found: dict[str, Function] = {}
    for _, text in python_files():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (one := _function(node)):
                found.setdefault(one.head, one)
    return list(found.values())


def _function(node: ast.FunctionDef) -> Function | None:
    doc = ast.get_docstring(node)
    if not doc or node.name.startswith(("_", "test")) or node.decorator_list or not node.args.args or len(doc) < 40:
        return None
    lines: list[str] = []
    for line in doc.splitlines():  # until sections of parameters or directives begin
        if line.strip().startswith(("..", ":param", ":return", ":rtype", "@param", "Args:", "Returns:", "Raises:")):
            break
        if line.strip() and set(line.strip()) <= {"-", "="}:
            lines = lines[:-1]
            break
        if sum(map(len, lines)) + len(line) > _MAX_HEAD:
            break
        lines.append(line.rstrip())
    text = "\n".join(lines).strip()
    summary = " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")
    if len(text) < 30 or not 20 <= len(summary) <= 160 or '"""' in text:
        return None
    quoted = '"""' + text.replace("\\", "\\\\") + ("\n" if "\n" in text else "") + '"""'
    body = "\n".join("    " + line if line else "" for line in quoted.splitlines())
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    head = f"def {node.name}({ast.unparse(node.args)}){returns}:\n{body}\n"
    bare = ast.FunctionDef(**{**vars(node), "body": node.body[1:] or [ast.Pass()]})
    return Function(node.name, head, summary, ast.unparse(bare))


def code_chats(rng: random.Random, count: int) -> Iterator[Chat]:
    """Code tasks: of ten, five complete a function, two write one, two ask about one, and one is in any language."""
    some = functions()
    rng.shuffle(some)
    for i in range(count):
        one, kind = some[i % len(some)], i % 10
        if kind < 5:
            yield _ask(rng.choice(_COMPLETE).format(one.head))
        elif kind < 7:
            task = one.summary[0].lower() + one.summary[1:]
            yield _ask(rng.choice((
                f"Write a Python function `{one.name}` with this purpose: {task}.",
                f"How do I do this in Python? {one.summary}.",
                f"I need a Python function to {task}. Show an example of its use, too.",
                f"Write a Python program that has a function for this: {task}.",
            )))  # fmt: skip
        elif kind < 9 and len(one.source) <= _MAX_SOURCE:
            yield _ask(rng.choice(_OF_SOURCE).format(one.source, source=one.source, language=rng.choice(LANGUAGES)))
        else:
            subject, language = rng.choice(CODE_SUBJECTS), rng.choice(("Python", "Python", *LANGUAGES))
            yield _ask(rng.choice(CODE_TASKS).format(subject=subject, language=language))


def other_chats(rng: random.Random, count: int) -> Iterator[Chat]:
    """Tasks about everything else; one of six goes on with a second question."""
    for i in range(count):
        subject, other = rng.choice(SUBJECTS), rng.choice(PAIRS)
        text = rng.choice(ABOUT_SUBJECTS).format(
            subject=subject, one=other[0], two=other[1], person=rng.choice(PEOPLE), place=rng.choice(PLACES),
            number=rng.randint(3, 7),
        )  # fmt: skip
        chat = _ask(text)
        if i % 6 == 0:
            chat += [{"role": "assistant", "content": ""}, {"role": "user", "content": rng.choice(AGAIN)}]
        yield chat


def _ask(text: str) -> Chat:
    return [{"role": "user", "content": text}]


def write(file: Path, count: int, held_out: Grams, seed: int = 0) -> tuple[int, int]:
    """Write `count` conversations as JSONL, half of them about code.

    Returns, for each half, the number of conversations that overlapped with `held_out` and were left out.
    """
    rng = random.Random(seed)
    chats: list[Chat] = []
    left_out = []
    for make in (code_chats, other_chats):
        own: dict[str, Chat] = {}
        overlaps = 0
        for chat in make(rng, 3 * count):
            if held_out.overlaps(chat[0]["content"]):
                overlaps += 1
            else:
                own.setdefault(chat[0]["content"], chat)
            if len(own) == count // 2:
                break
        chats += own.values()
        left_out.append(overlaps)
    rng.shuffle(chats)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    return left_out[0], left_out[1]
