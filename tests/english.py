"""Finds sentences that need a second reading: what a machine can check of the project's English.

`python -m tests.english FILE...` prints them, `--comments` those of comments too. tests/unit/test_english.py holds them
to none. Sources: docstrings, comments, and the prose of Markdown.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOST_WORDS = 30
"""In one sentence."""

MEAN_WORDS = 18
"""At most, over the sentences of a file."""

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_INDENTED_CODE = re.compile(r"(?:^|\n\n)(?: {4,}[^\n]*(?:\n|$))+")
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])[)\"'`*]*\s+|\n\s*\n|\n(?=[-*|] |\d+\. )|(?<=\))\. ")
_ONLY_REFERS = re.compile(r"(?:see|as|like) (?:`?[\w./]+`?)(?:[ ,](?:and )?`?[\w./]+`?)?\.?", re.IGNORECASE)
_STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'{3}(?:\\.|[^\\])*?\'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<comment>#[^\n]*)''',
    re.DOTALL,
)
_WORDS_TO_AVOID = {"beside": "next to", "behind": "after"}


class Text(NamedTuple):
    """A docstring, a comment or a paragraph: the line it begins at, what it is, and its words."""

    line: int
    kind: str
    text: str


class Problem(NamedTuple):
    """A sentence, and what is wrong with it."""

    line: int
    what: str
    sentence: str


@functools.cache
def texts_of(path: Path, comments: bool = True) -> tuple[Text, ...]:
    """The prose of a Python or Markdown file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return tuple(_markdown(source))
    return tuple(sorted([*_docstrings(source), *(_comments(source) if comments else ())]))


@functools.cache
def sentences(text: str) -> tuple[str, ...]:
    """Sentences of a text, without code. An item of a list is a sentence."""
    text = _INDENTED_CODE.sub("\n\n", _FENCE.sub("\n\n", text))
    parts = (" ".join(part.split()) for part in _END_OF_SENTENCE.split(text))
    return tuple(part for part in parts if part and re.search(r"[A-Za-z]", part))


@functools.cache
def num_words(sentence: str) -> int:
    """Words, of which code between backticks and a bracket of code are one each."""
    shorter = re.sub(r"`[^`]*`|\[[^\]]*\](?:\([^)]*\))?|\([^)]*\)", "x", sentence)
    return sum(bool(re.search(r"\w", word)) for word in shorter.split())


def problems(path: Path, comments: bool = True) -> list[Problem]:
    """Sentences of a file that break a rule."""
    found = []
    for line, kind, text in texts_of(path, comments):
        if kind == "docstring" and re.match(r"Of\b", text):
            found.append(Problem(line, "begins with 'Of'", text.split("\n")[0]))
        if kind == "docstring" and _ONLY_REFERS.fullmatch(text.strip()):
            found.append(Problem(line, "only refers elsewhere", text))
        for sentence in sentences(text):
            if num_words(sentence) > MOST_WORDS:
                found.append(Problem(line, f"{num_words(sentence)} words", sentence))
            prose = re.sub(r"`[^`]*`", "", sentence)
            for word, instead in _WORDS_TO_AVOID.items():
                if re.search(rf"\b{word}\b", prose, re.IGNORECASE):
                    found.append(Problem(line, f"{word!r}: say {instead!r}", sentence))
    return found


def mean_words(path: Path, comments: bool = True) -> float:
    """Words per sentence of a file; 0 where there are none."""
    lengths = [num_words(one) for text in texts_of(path, comments) for one in sentences(text.text)]
    return sum(lengths) / max(len(lengths), 1)


def _docstrings(source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield Text(statement.lineno, "docstring", _clean(value.value))


def _clean(docstring: str) -> str:
    lines = docstring.strip().split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    return "\n".join([lines[0], *(line[margin:] for line in lines[1:])])


def _comments(source: str) -> Iterator[Text]:
    """Comments on lines that follow each other are one text."""
    block: list[str] = []
    begin = last = 0
    for token in _STRING_OR_COMMENT.finditer(source):
        if token["comment"] is None or token["comment"].startswith(("# type:", "# noqa", "# fmt:", "#!")):
            continue
        text = re.sub(r"#\s?(?:noqa|type: ignore|pragma).*", "", token["comment"].lstrip("# ")).strip()
        line = source.count("\n", 0, token.start()) + 1
        whole_line = not source[source.rfind("\n", 0, token.start()) + 1 : token.start()].strip()
        if block and whole_line and line == last + 1:
            block.append(text)
        else:
            if block:
                yield Text(begin, "comment", "\n".join(block))
            block, begin = [text], line
        last = line if whole_line else -1
    if block:
        yield Text(begin, "comment", "\n".join(block))


def _markdown(source: str) -> Iterator[Text]:
    prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), source)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", prose):
        if paragraph.strip() and not paragraph.lstrip("\n").startswith(("|", "    ", "<", "!", "---")):
            yield Text(line, "paragraph", paragraph)
        line += paragraph.count("\n")


def main() -> int:
    """0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--comments", action="store_true", help="look at comments too")
    asked = parser.parse_args()
    count = 0
    for path in asked.files:
        for problem in problems(path, asked.comments):
            print(f"{path}:{problem.line}: {problem.what}: {problem.sentence}")
            count += 1
        mean = mean_words(path, asked.comments)
        if mean > MEAN_WORDS:
            print(f"{path}: {mean:.1f} words a sentence on average; at most {MEAN_WORDS}")
            count += 1
    return bool(count)


if __name__ == "__main__":
    raise SystemExit(main())
