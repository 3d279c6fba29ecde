"""Drafters of vLLM's newer runner (tests/models/newer_heads.py) in whole engines.

One is an assistant that has only queries and reads the target's KV; it replaces an MLP speculator. The other is a set
of modules with two KV groups; it replaces MiMo's modules.

Outputs are those of plain decoding of each request alone, bit for bit. Drafts are those of an engine that prefills each
prompt at once and never uses a draft.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.head_cases import PLAIN, TIGHT, Reference, assert_right, chunks_of, refer, step_of
from tests.e2e.tiny import add_tokenizer, draw_cases, make_target
from tests.head_checkpoints import make_mlp_speculator
from tests.models.newer_heads import AsPlain, Assistant, StepHead
from trtspec import LLM
from trtspec.backends.eager import EagerExecutable
from trtspec.engine.stats import TimedExecutable
from trtspec.methods.mtp.worker import MtpWorker
from trtspec.methods.step import OneEngineStep
from trtspec.methods.worker import SpecWorker

K = 3
CASES = draw_cases(12, seed=43, most_prompt=60)
WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}  # the second of two layers

Make = Callable[..., LLM]
DRAFTERS = ("assistant", "modules")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two targets, `assistant` and `modules`, and `speculator`, an MLP speculator for `assistant`."""
    folder = tmp_path_factory.mktemp("newer")
    add_tokenizer(make_target(folder, "qwen2", name="assistant", **WINDOWED))
    add_tokenizer(make_target(folder, "mimo", name="modules", num_nextn_predict_layers=K))
    make_mlp_speculator(folder, folder / "assistant", name="speculator", n_predict=K, inner_dim=8)
    return folder


@pytest.fixture(scope="module")
def make(folder: Path) -> Make:
    """(drafter, engine options) -> LLM that drafts with it.

    Each launch is checked to leave the target's KV as plain decoding does.
    """

    def make(drafter: str, **options: Any) -> LLM:
        own: dict[str, Any] = {"method": "mlp_speculator", "model": str(folder / "speculator")}
        wishes = own if drafter == "assistant" else {"method": "mtp"}
        llm = LLM(folder / drafter, {**wishes, "num_speculative_tokens": K}, **options)
        step, timed = step_of(llm), llm.engine.loop.target
        assert isinstance(step, OneEngineStep)
        assert isinstance(timed, TimedExecutable)
        assert isinstance(timed.inner, EagerExecutable)
        kv_shapes, capture = step.kv_layers, step.worker.capture_layers
        if drafter == "assistant":
            worker = SpecWorker(Assistant(step.decoder, (1, 0)), K, capture)
        else:
            worker = MtpWorker(StepHead(step.decoder, (4, None, 4)), K, capture)
        timed.inner.step = AsPlain(step.decoder, worker)
        assert [layer[:2] for layer in timed.inner.step.kv_layers] == [layer[:2] for layer in kv_shapes]
        return llm

    return make


@pytest.fixture(scope="module")
def reference(folder: Path, make: Make) -> Callable[[str], Reference]:
    """drafter -> its reference, computed when first asked for."""
    return functools.cache(lambda drafter: refer(folder / drafter, lambda: make(drafter, **PLAIN), CASES))


@pytest.mark.parametrize("told", [True, False], ids=["told", "own"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_changes_nothing(
    make: Make, reference: Callable[[str], Reference], drafter: str, told: bool
) -> None:
    """Speculation changes nothing in a cache too small for all, with prompts in chunks.

    Drafts are right and wrong at every position.
    """
    with make(drafter, max_batch_size=6, **TIGHT) as llm:
        rows = chunks_of(llm, 5)
        run = assert_right(llm, reference(drafter), told)
        assert rows() == 5
        assert llm.engine.stats.preemptions > 0
        assert run.num_mixed_steps > 0
    if told:
        acceptance = run.speculation.acceptance_per_position
        assert len(acceptance) == K
        assert all(0 < share < 1 for share in acceptance), acceptance
