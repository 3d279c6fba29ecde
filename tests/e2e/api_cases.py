"""Shared parts of the tests of LLM's calls: one engine, short ways to call it, and checkpoints with changed fields."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtspec import LLM, SamplingParams
from trtspec.outputs import CompletionOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def llm(target: Path) -> Iterator[LLM]:
    with LLM(target, NGRAM, num_kv_blocks=40, block_size=4, max_batch_size=8) as llm:
        yield llm


def one(llm: LLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    (output,) = llm.generate(prompt, params)
    return output.outputs[0]


def copy_of(folder: Path, to: Path, **json_files: dict[str, Any]) -> Path:
    """Copy the checkpoint `folder` to `to` and change some of its json files: name of a file -> fields to set."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for name, fields in json_files.items():
        file = to / f"{name}.json"
        old = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**old, **fields}))
    return to


def ending(llm: LLM, **fields: Any) -> CompletionOutput:
    """Return the greedy output for "abc", unless `fields` say otherwise.

    Tests look at where it ends, not at its text.
    """
    return one(llm, "abc", SamplingParams(**{"temperature": 0.0, "max_tokens": 30, **fields}))


@pytest.fixture(scope="module")
def greedy_ids(llm: LLM) -> list[int]:
    return list(ending(llm, ignore_eos=True).token_ids)
