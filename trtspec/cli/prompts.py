"""Sources of the benchmarks' prompts."""

from __future__ import annotations

import json
from pathlib import Path

from trtspec.errors import RequestError
from trtspec.train.data import standard_library


def read_jsonl(path: Path) -> list[str]:
    """Return the "prompt" of every line, whole: --input-len does not cut it."""
    try:
        prompts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(f'{path}: every line must be a JSON object with a "prompt" ({error!r})') from error
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise RequestError(f"{path}: every prompt must be a text, and there must be one")
    return prompts


def read_texts(source: str | None) -> list[str]:
    """Return the texts of the given file or folder of .py files.

    Without `source`, these are the held-out files of Python's own standard library.
    """
    if source is None:
        return [file.text for file in standard_library() if file.held_out]
    path = Path(source)
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]
