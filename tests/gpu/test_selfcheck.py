"""The checks of this folder, for machines without a GPU: a small part of each, on the CPU's kernels.

Engines run on a thread that stands in for a GPU's queue. So errors in a check itself show on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.async_stand_in import HostQueue
from tests.contract import batches
from tests.e2e.conformance import CASES, LIMITS, TIGHT, K, wishes
from tests.e2e.test_faults import VICTIM
from tests.gpu import engines, faults, kernels, rows
from tests.gpu.engines import DEMO, WIDE, on_gpu
from tests.gpu.gpu import WHY_NOT
from tests.gpu.kernels import ATTENTION_MODELS, LAYOUTS, Layer, random_rows
from tests.unit.attention_cases import Batch, Model, Part, TreePart
from trtspec import LLM
from trtspec.errors import DeviceError
from trtspec.ops import load_plugins

pytestmark = pytest.mark.skipif(not WHY_NOT, reason="there is a GPU, on which all checks run")

CPU = torch.device("cpu")
few = settings(deadline=None, max_examples=5)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_plugins()


@few
@given(st.sampled_from(ATTENTION_MODELS), kernels.ragged(60), st.booleans(), st.integers(0, 2**31))
def test_attention(model: Model, parts: list[Part], tree: bool, seed: int) -> None:
    mask = kernels.trees(parts, seed) if tree else None
    kernels.check_attention(model.random_sequences(3, 60, seed).batch(parts, mask), CPU)


@few
@given(batches.attention())
def test_attention_over_any_blocks(arguments: dict[str, Tensor]) -> None:
    none = torch.empty(0)
    kernels.check_attention(Batch(**arguments, tree_mask=none.int(), sinks=none, scale=0.3), CPU)


@few
@given(st.one_of(batches.logits(), kernels.vocabularies()))
def test_logits(arguments: dict[str, Tensor]) -> None:
    kernels.check_logits(arguments, CPU)


@few
@given(st.one_of(batches.sample(vocab_ids=True), kernels.draws()))
def test_draws(arguments: dict[str, Tensor]) -> None:
    kernels.check_sample(arguments, CPU)


@pytest.mark.parametrize("own_ids", [False, True])
def test_noise(own_ids: bool) -> None:
    kernels.check_noise(20, 517, own_ids, CPU)


@few
@given(batches.accept(), batches.compact())
def test_acceptance_and_compaction(accepted: dict[str, Tensor], compacted: dict[str, Tensor]) -> None:
    kernels.check_accept(accepted, CPU)
    kernels.check_compact(compacted, CPU)


@pytest.mark.parametrize("dtype", list(kernels.ROUNDING))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linears(layout: str, dtype: torch.dtype) -> None:
    for width, bias, float_out in ((33, None, True), (64, torch.randn(64).to(dtype), False)):
        layer = Layer.random(layout, dtype, width, 200)
        kernels.check_linear(layer, random_rows(dtype, 5, layer.depth), bias, float_out, CPU)
        kernels.check_embedding(layer, torch.tensor([3, 0, 32]), CPU)


@pytest.mark.parametrize("model", ATTENTION_MODELS[::2], ids=lambda model: f"{model.dtype}")
def test_rows_of_attention(model: Model) -> None:
    parts = [Part(0, 70, 4), Part(1, 0, 30), Part(2, 100, 1)]
    rows.check_attention_rows(model, parts, [(0, 0), (0, 3), (1, 1), (1, 29), (2, 0)], CPU, rows.ANY_FORM)


def test_nodes_of_draft_trees() -> None:
    rows.check_tree_rows(ATTENTION_MODELS[1], TreePart(0, 60, (-1, -1, 0, 1, 1, 3)), CPU, rows.ANY_FORM)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_linears(layout: str) -> None:
    layer = Layer.random(layout, torch.bfloat16, 40, 128)
    rows.check_linear_rows(layer, random_rows(torch.bfloat16, 20, layer.depth), (1, 2, 4, 17, 20))


def test_rows_of_filters_and_draws() -> None:
    rows.check_logits_rows(300, 5, CPU)


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_engines(models: Path, work: HostQueue) -> None:
    """Engines of fp32, whose ids equal eager's, with drafts and without."""
    target, cases = models / "target", CASES[:12]
    plain = engines.alone(target, cases)
    engines.check_words_are_eager_s(target, cases, plain, 0.0)
    eagle3 = wishes("eagle3", models, False)
    engines.check_graphs_change_nothing(target, eagle3, cases)
    engines.check_any_order_changes_nothing(target, eagle3, CASES[:14], 1)
    engines.check_prefixes_are_found(target, eagle3)
    engines.check_chunks_change_nothing(target, eagle3)
    assert work.num_replayed > 50


@pytest.mark.parametrize("mode", ["eagle3", pytest.param("draft", marks=pytest.mark.long)])
def test_speculation_changes_nothing(models: Path, work: HostQueue, mode: str) -> None:
    plain = engines.alone(models / "target", CASES[:20])
    with on_gpu(models / "target", wishes(mode, models, False), **LIMITS, **TIGHT) as llm:
        run = engines.run_together(llm.engine, CASES[:20])
    assert run.outcomes == plain
    assert len(run.speculation.acceptance_per_position) == K
    assert all(0 < share < 1 for share in run.speculation.acceptance_per_position)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_engines(models: Path, work: HostQueue, quantization: str) -> None:
    theirs = engines.alone(models / "target", CASES[:3], quantization=quantization)
    engines.check_words_are_eager_s(models / "target", CASES[:3], theirs, 0.0, quantization=quantization)


@pytest.mark.long
@pytest.mark.parametrize("shape", engines.TREES)
def test_draft_trees(models: Path, work: HostQueue, shape: str) -> None:
    engines.check_trees_change_nothing(models, "eagle3", shape)


@pytest.mark.long
def test_engine_folders(models: Path, work: HostQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtspec.backends.cuda.aoti.open_gpu", lambda: work.device)
    engines.check_engine_folders(models, tmp_path, "float32")


def test_the_demo(work: HostQueue) -> None:
    with LLM(DEMO / "target") as llm:
        cases = engines.demo_cases(llm, 6)
    plain = engines.alone(DEMO / "target", cases)
    with on_gpu(DEMO / "target", engines.demo_speculation("eagle3"), **WIDE) as llm:
        assert engines.run_together(llm.engine, cases).outcomes == plain


# -- faults ------------------------------------------------------------------------------------------------------------


def test_faults_of_a_request(models: Path, work: HostQueue) -> None:
    faults.check_it_fails_alone(models / "target", VICTIM, poisoned=True)
    faults.check_it_fails_alone(models / "target", faults.BANNED, poisoned=False)


def test_a_lost_device(models: Path, work: HostQueue) -> None:
    def provoke() -> None:
        raise DeviceError("the GPU failed: CUDA error: told to; start this process anew")

    faults.assert_lost(json.loads(faults.lose_device(models / "target", provoke)))
