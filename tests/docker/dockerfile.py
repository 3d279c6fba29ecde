"""A parser of Dockerfiles for what ours contain; the reference is https://docs.docker.com/reference/dockerfile/."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

_KNOWN = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "STOPSIGNAL", "USER",
    "WORKDIR",
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """An instruction. flags: the --name=value after the word; rest: the text after the flags, as it is written."""

    word: str
    flags: tuple[tuple[str, str], ...]
    rest: str
    line: int

    def flag(self, name: str) -> str | None:
        """Value of the last flag of that name."""
        return dict(self.flags).get(name)

    @property
    def listed(self) -> list[str] | None:
        """Words of the exec form; None for another form."""
        try:
            parsed = json.loads(self.rest)
        except ValueError:
            return None
        return parsed if isinstance(parsed, list) else None


@dataclass
class Stage:
    """The instructions from one FROM to the next."""

    base: str
    name: str | None
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, word: str) -> Instruction | None:
        """The last instruction of that word, which counts if the word may be given once."""
        return next((one for one in reversed(self.instructions) if one.word == word), None)


def parse(text: str) -> list[Stage]:
    """The stages of a Dockerfile. ValueError for what this parser does not know."""
    stages: list[Stage] = []
    for instruction in _instructions(text):
        if instruction.word == "FROM":
            base, *alias = instruction.rest.split()
            if alias and (len(alias) != 2 or alias[0].upper() != "AS"):
                raise ValueError(f"line {instruction.line}: FROM {instruction.rest}")
            stages.append(Stage(base, alias[1] if alias else None))
        elif not stages:
            raise ValueError(f"line {instruction.line}: {instruction.word} before FROM")
        else:
            stages[-1].instructions.append(instruction)
    return stages


def _instructions(text: str) -> list[Instruction]:
    found, pending, start = [], "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not pending and not line.strip()):
            continue
        start = start if pending else number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        word, _, rest = (pending + line).strip().partition(" ")
        pending, rest, flags = "", rest.strip(), []
        if word.upper() not in _KNOWN:
            raise ValueError(f"line {start}: unknown instruction {word}")
        while match := re.match(r"--([a-z-]+)=(\S+)\s*", rest):
            flags.append((match[1], match[2]))
            rest = rest[match.end() :]
        found.append(Instruction(word.upper(), tuple(flags), rest, start))
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $name, ${name} and ${name:-default} by their values; unknown variables are empty."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3] or ""
        return variables.get(name) or default

    return re.sub(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})", value, text)


def pairs(rest: str) -> dict[str, str]:
    """Variables of an ENV instruction: name=value ..., quoted as in a shell."""
    return dict(one.split("=", 1) for one in shlex.split(rest))


def healthcheck(instruction: Instruction) -> list[str]:
    """Command of a HEALTHCHECK, in exec form. ValueError for another form."""
    word, _, command = instruction.rest.partition(" ")
    parsed = json.loads(command)
    if word != "CMD" or not isinstance(parsed, list):
        raise ValueError(f"line {instruction.line}: HEALTHCHECK {instruction.rest}")
    return parsed


class Ignored:
    """A .dockerignore: the last pattern that matches a path, or a folder above it, decides."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._rules = [
            (not line.startswith("!"), _pattern(line.lstrip("!").strip("/")))
            for line in lines
            if line and not line.startswith("#")
        ]

    def __call__(self, path: str) -> bool:
        above = [path, *map(str, PurePosixPath(path).parents)]
        ignored = False
        for excludes, pattern in self._rules:
            if any(pattern.fullmatch(one) for one in above if one != "."):
                ignored = excludes
        return ignored

    def context(self, root: Path) -> list[Path]:
        """Files that a build gets, relative to `root`."""
        files = (path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file())
        return [path for path in files if not self(path.as_posix())]


def _pattern(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts))
