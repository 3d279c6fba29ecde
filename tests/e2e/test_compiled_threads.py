"""Compiled engines on several threads: the text is that of one thread, however many rows a step has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.tiny import Case, Run, add_tokenizer, make_target, run_together
from trtspec import LLM, SamplingParams
from trtspec.backends.aoti import graph_compiler
from trtspec.backends.aoti.loops import share_loops
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.interop.reading import read_speculative_config
from trtspec.ops import load_plugins

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

MOTIF = list(range(3, 9)) * 10
CASES = [
    Case(MOTIF[: 20 + i], SamplingParams(temperature=i % 2 / 2, seed=i, max_tokens=48, ignore_eos=True))
    for i in range(32)
]


@pytest.mark.long
@pytest.mark.usefixtures("two_threads")
def test_rows_that_threads_share_do_not_change_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 16 requests with 7 drafts each has 128 rows of 512 values, which two threads share.

    Loops over such rows keep values of one row in buffers. Each thread needs its own.
    """
    sources: list[str] = []

    def share(kernels: str) -> str:
        sources.append(kernels)
        return share_loops(kernels)

    monkeypatch.setattr(graph_compiler, "share_loops", share)
    target = make_target(tmp_path, hidden_size=512, intermediate_size=512, head_dim=32, num_hidden_layers=3)
    add_tokenizer(target)
    asked = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1}
    config = EngineConfig(backend="aoti", dtype="bfloat16", max_batch_size=16, max_num_tokens=512)
    engine = build_engine(target, tmp_path / "engine", read_speculative_config(asked), config)
    assert any("loadu(local_buffer_data_0 " in kernels for kernels in sources)

    def run(threads: int) -> Run:
        torch.set_num_threads(threads)
        with LLM(engine.path, num_kv_blocks=128) as llm:
            return run_together(llm.engine, CASES)

    shared = run(2)
    assert max(sum(1 + one.draft_len for one in step if one.tokens) for step in shared.steps) > 100
    assert shared.outcomes == run(1).outcomes
