"""The GPU's executable without a GPU: the same static regions, buckets, graphs and carried inputs.

A thread of the CPU stands in for the device. A replayed graph does its work again. Ids are those of eager decoding.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.async_stand_in import HostQueue
from tests.e2e.teller import Teller, generated
from tests.e2e.tiny import (
    Case,
    Outcome,
    assert_all_blocks_free,
    draw_cases,
    perturbed,
    run_alone,
    run_together,
    with_constraints,
)
from tests.head_checkpoints import make_eagle, make_eagle3
from trtspec import LLM, SamplingParams, StructuredOutputs
from trtspec.backends.compiled import LoadedGraph
from trtspec.backends.cuda import aoti as cuda_aoti
from trtspec.backends.cuda.executable import CudaExecutable, LaunchLimits
from trtspec.build import models as build_models
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.engine.overlap import OverlapLoop
from trtspec.interop.reading import read_speculative_config
from trtspec.models.layers import Linear

K = 3
LIMITS: dict[str, Any] = {"max_batch_size": 5, "max_num_tokens": 48, "block_size": 4, "num_kv_blocks": 90}
SPECULATION = {
    "none": None,
    "eagle3": {"method": "eagle3", "num_speculative_tokens": K},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": K},
    "draft_inside": {"method": "draft_model", "num_speculative_tokens": K, "one_engine": True},
    "eagle3_two_engine": {"method": "eagle3", "num_speculative_tokens": K, "one_engine": False},
    "eagle_two_engine": {"method": "eagle", "num_speculative_tokens": K, "one_engine": False},
    "ngram": {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1},
}


@pytest.fixture(scope="module")
def models(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cuda")
    draft, eagle3 = perturbed(target, 0.1, folder), make_eagle3(folder, target, (0, 1), tuple(range(11)))
    return {
        "target": target,
        "eagle3": eagle3,
        "eagle3_two_engine": eagle3,
        "eagle_two_engine": make_eagle(folder, target),
        "draft_model": draft,
        "draft_inside": draft,
    }


def speculation(models: dict[str, Path], mode: str) -> dict[str, Any] | None:
    fields = SPECULATION[mode]
    return {**fields, "model": str(models[mode])} if fields and mode in models else fields


@pytest.fixture(scope="module")
def mixed(models: dict[str, Path]) -> tuple[list[Case], list[Outcome]]:
    """Requests of all kinds, and their outcomes without speculation, one case at a time."""
    cases = draw_cases(20, 5, most_prompt=60, most_tokens=50)
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        return cases, run_alone(llm.engine, cases)


@pytest.mark.parametrize("overlaps", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", [mode for mode in SPECULATION if not mode.endswith("two_engine")])
def test_ids_are_those_of_eager_decoding(
    models: dict[str, Path], mixed: tuple[list[Case], list[Outcome]], work: HostQueue, mode: str, overlaps: bool
) -> None:
    """Ids are those of eager decoding while requests of all kinds come and go.

    With drafts from the host, no step is launched before the last has completed.
    """
    cases, outcomes = mixed
    options = {**LIMITS, "backend": "cuda", "debug": True, "disable_overlap_scheduler": not overlaps}
    with LLM(models["target"], speculation(models, mode), **options) as llm:
        assert isinstance(llm.engine.loop, OverlapLoop) == (overlaps and mode in ("none", "eagle3", "draft_inside"))
        captured = work.num_captured
        if mode == "eagle3":
            step = llm.engine.loop.target.inner.step
            step.worker = Teller(step.worker, cases, outcomes)
        run = run_together(llm.engine, cases)
        assert run.outcomes == outcomes
        assert_all_blocks_free(llm)
    assert captured >= 2 * len(LaunchLimits(LIMITS["max_batch_size"], 1).buckets)
    assert work.num_replayed >= 10
    if mode != "none":
        accepted = run.speculation.acceptance_per_position
        assert len(accepted) == K
        assert all(0 < rate < 1 for rate in accepted)


@pytest.mark.parametrize("mode", ["none", "eagle3", "draft_model"])
def test_constraints_on_logits_are_those_of_eager_decoding(models: dict[str, Path], work: HostQueue, mode: str) -> None:
    """Outputs and logprobs with constraints are those of eager decoding.

    A batch with penalties or biases runs kernel by kernel. No step is launched before the last has completed.
    """
    drawn = draw_cases(18, 6, most_prompt=60, most_tokens=30)
    cases = drawn[:6] + with_constraints(drawn[6:])
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        want = [one.outputs[0] for one in generated(llm, cases)]
    with LLM(models["target"], speculation(models, mode), **{**LIMITS, "backend": "cuda", "debug": True}) as llm:
        got = [one.outputs[0] for one in generated(llm, cases)]
        assert isinstance(llm.engine.loop, OverlapLoop) == (mode != "draft_model")
        assert_all_blocks_free(llm)
    assert work.num_replayed > 0  # batches without penalties and biases
    for one, other in zip(got, want, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


@pytest.mark.parametrize("mode", ["none", "eagle3"])
def test_logprobs_and_masks_do_not_stop_graphs(
    models: dict[str, Path], work: HostQueue, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generations with logprobs, and with masks of what they may draw, run as graphs, with eager's outputs."""
    lasting: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    guide = StructuredOutputs(regex="(bg|gb|g){40,}")
    params = [
        SamplingParams(logprobs=2, **lasting),
        SamplingParams(temperature=1.0, seed=1, **lasting),
        SamplingParams(temperature=0.8, seed=2, max_tokens=40, structured_outputs=guide),
    ]
    cases = [Case([i + 1, 2, 3, 5 * i], one) for i, one in enumerate(params)]
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        want = [one.outputs[0] for one in generated(llm, cases)]
    by_kernels: list[bool] = []
    run_kernels = CudaExecutable._run_kernels

    def run(self: CudaExecutable, graph: LoadedGraph, *rest: Any) -> Any:
        by_kernels.append(graph.uniform)
        return run_kernels(self, graph, *rest)

    monkeypatch.setattr(CudaExecutable, "_run_kernels", run)
    for some in (cases[:2], cases):  # logprobs without masks, and with them
        with LLM(models["target"], speculation(models, mode), backend="cuda", **LIMITS) as llm:
            got = [one.outputs[0] for one in generated(llm, some)]
        assert [one.token_ids for one in got] == [one.token_ids for one in want[: len(some)]]
        assert [one.logprobs for one in got] == [one.logprobs for one in want[: len(some)]]
    assert set(by_kernels) == {False}  # steps with prompts, or with fewer drafts than K


# -- a draft model: all of its passes are one launch -------------------------------------------------------------------


def test_a_generation_step_costs_two_launches(models: dict[str, Path], work: HostQueue) -> None:
    """A generation step costs one launch of the target and one of the draft, whatever was accepted before.

    Both launches are graphs.
    """
    params = [
        SamplingParams(temperature=temperature, top_k=12, seed=i, max_tokens=60, ignore_eos=True)
        for i, temperature in enumerate((0.0, 1.0, 0.6))
    ]
    cases = [Case([i + 1, 2, 3, 5 * i], one) for i, one in enumerate(params)]
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    with LLM(models["target"], speculation(models, "draft_model"), backend="cuda", **LIMITS) as llm:
        requests = [llm.engine.add_request(case.prompt, case.params)[0] for case in cases]
        counted, accepted = [], set()
        while llm.engine.has_work:
            draft = llm.engine.executables[1]
            before = work.num_submitted, work.num_replayed, draft.launches, draft.bytes_read
            emissions = llm.engine.step()
            after = work.num_submitted, work.num_replayed, draft.launches, draft.bytes_read
            all_want = all(len(request.output_ids) < 60 - K for request in requests)  # K drafts for the next step
            if all_want and not any(emission.is_context for emission in emissions):
                counted.append([now - then for then, now in zip(before, after, strict=True)])
                accepted |= {emission.num_drafts for emission in emissions}
        assert [Outcome.of(request) for request in requests] == outcomes
    assert len(counted) > 10
    assert all(step == [2, 2, 1, K * draft.weight_bytes] for step in counted)
    assert accepted == set(range(K + 1))


# -- draft layers next to the target ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eagle3_two_engine", "eagle_two_engine"])
def test_draft_layers_next_to_the_target_read_its_states_on_the_device(
    models: dict[str, Path], work: HostQueue, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft layers next to the target run kernel by kernel and make the drafts of eager.

    Their input states stay on the device. Requests are preempted, and prompts are prefilled in chunks. While there are
    four requests, steps have no drafts; after that, drafting needs rows of states that are older than a step.
    """
    cases = draw_cases(12, 12, most_prompt=60, most_tokens=70)
    fields = {**(speculation(models, mode) or {}), "draft_len_schedule": {3: K, 4: 0, 5: 2}}
    limits = {**LIMITS, "num_kv_blocks": 40}
    copied = []
    for name in ("to_device", "to_host"):
        inner = getattr(work, name)
        monkeypatch.setattr(work, name, lambda tensor, inner=inner: copied.append(tensor) or inner(tensor))
    runs = []
    for backend in ("eager", "cuda"):
        with LLM(models["target"], fields, backend=backend, debug=True, **limits) as llm:
            runs.append(run_together(llm.engine, cases))
            assert_all_blocks_free(llm)
            assert llm.engine.stats.preemptions > 0
            assert llm.engine.stats.drafter_failures == 0
    eager, cuda = runs
    assert cuda.outcomes == eager.outcomes
    assert cuda.speculation == eager.speculation
    assert all(0 < rate < 1 for rate in cuda.speculation.acceptance_per_position)
    assert work.num_captured == 0
    assert len(copied) > 500
    assert not [tensor for tensor in copied if tensor.is_floating_point() and tensor.ndim == 2]


STATES: dict[str, dict[str, Any]] = {
    "few blocks": {"num_kv_blocks": 34},
    "none for 5, fewer for 2": {"draft_len_schedule": {1: 3, 2: 2, 4: 3}},
    "greedy drafts": {"draft_sample_method": "greedy"},
}


@pytest.mark.parametrize(
    "state", [state if state == "few blocks" else pytest.param(state, marks=pytest.mark.long) for state in STATES]
)
def test_a_chain_in_one_launch_speculates_as_one_pass_by_pass(
    models: dict[str, Path], work: HostQueue, state: str
) -> None:
    """One launch for a whole chain makes the same drafts, so the same steps, as one launch for each pass.

    Requests share prompts, come and go, are preempted, and have steps without drafts.
    """
    drawn = draw_cases(14, 6, most_prompt=50, most_tokens=40)
    cases = [
        Case(drawn[i // 2 * 2].prompt, dataclasses.replace(case.params, stop=(), stop_token_ids=(), ignore_eos=True))
        for i, case in enumerate(drawn)
    ]
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    changed = STATES[state]
    limits = {name: changed.get(name, value) for name, value in LIMITS.items()}
    fields = {name: value for name, value in changed.items() if name not in LIMITS}
    runs, launches = [], []
    for in_one in (True, False):
        speculated = {**(speculation(models, "draft_model") or {}), **fields}
        with LLM(models["target"], speculated, backend="cuda", debug=True, **limits) as llm:
            if not in_one:
                drafter: Any = llm.engine.loop.proposer.drafter
                drafter.chain = None
            runs.append(run_together(llm.engine, cases))
            launches.append(llm.engine.executables[1].launches)
            assert runs[-1].outcomes == outcomes
            assert_all_blocks_free(llm)
            stats = llm.engine.stats
            assert stats.drafter_failures == 0
            assert stats.prefix_hit_tokens > 0
            assert (stats.preemptions > 0) == (state == "few blocks")
    one, many = ([[(e.tokens, e.num_drafts, e.draft_len) for e in step] for step in run.steps] for run in runs)
    assert one == many
    assert launches[0] < launches[1] / 1.5
    assert all(0 < rate < 1 for rate in runs[0].speculation.acceptance_per_position)


def test_graphs_without_drafts_verify_those_of_the_host(
    models: dict[str, Path], work: HostQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs without drafts can verify drafts of the host.

    An engine folder built without speculation has such graphs; it can be run with a drafter.
    """
    monkeypatch.setattr(build_models, "_module_draft_lens", lambda context, step: (0,))
    cases = draw_cases(16, 5, most_prompt=60, most_tokens=40)
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    with LLM(models["target"], speculation(models, "ngram"), backend="cuda", debug=True, **LIMITS) as llm:
        assert llm.engine.loop.target.inner.compiled.draft_lens == (0,)
        run = run_together(llm.engine, cases)
        assert run.outcomes == outcomes
        assert llm.engine.executables[0].launches == llm.engine.stats.steps  # no launch failed and was retried
        assert_all_blocks_free(llm)
    assert run.speculation.num_accepted_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize("mode", ["eagle3", "eagle3_two_engine", "draft_model"])
def test_an_engine_folder(
    models: dict[str, Path], work: HostQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """An engine folder of AOTInductor's graphs returns the ids of eager decoding.

    The graphs are compiled for the CPU, which stands in for the GPU.
    """
    monkeypatch.setattr(cuda_aoti, "open_gpu", lambda: work.device)
    cases = draw_cases(16, 5, most_prompt=60, most_tokens=40)
    config = EngineConfig(backend="cuda", max_batch_size=5, max_num_tokens=48, block_size=4)
    build_engine(models["target"], tmp_path / "engine", read_speculative_config(speculation(models, mode)), config)
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    with LLM(tmp_path / "engine", num_kv_blocks=90, debug=True) as llm:
        assert isinstance(llm.engine.loop, OverlapLoop) == (mode == "eagle3")
        assert all(isinstance(one.inner, cuda_aoti.AotiOnCuda) for one in llm.engine.executables)
        drafter: Any = llm.engine.loop.proposer.drafter
        assert getattr(drafter, "chain", None) is not None or mode != "draft_model"
        run = run_together(llm.engine, cases)
        assert run.outcomes == outcomes
        assert_all_blocks_free(llm)
    assert run.speculation.num_accepted_tokens > 0
    assert work.num_replayed == 0 if mode == "eagle3_two_engine" else work.num_replayed >= 10


def test_without_graphs_the_same_runs_kernel_by_kernel(models: dict[str, Path], work: HostQueue) -> None:
    cases = draw_cases(8, 7, most_prompt=30)
    with LLM(models["target"], enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    with LLM(models["target"], backend="cuda", enable_cuda_graph=False, **LIMITS) as llm:
        assert run_together(llm.engine, cases).outcomes == outcomes
    assert work.num_captured == 0


def test_hidden_states_are_saved(models: dict[str, Path], work: HostQueue, tmp_path: Path) -> None:
    """Saved hidden states are those of eager.

    They cover every row of a step, so no graph fits, and every step is waited for.
    """
    saved = {}
    for backend in ("eager", "cuda"):
        fields = {"method": "extract_hidden_states", "output_directory": str(tmp_path / backend), "capture_layers": [1]}
        with LLM(models["target"], fields, backend=backend, **LIMITS) as llm:
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
            assert not isinstance(llm.engine.loop, OverlapLoop)
        (shard,) = (tmp_path / backend).glob("*.safetensors")
        saved[backend] = load_file(shard)
    assert saved["eager"].keys() == saved["cuda"].keys()
    assert all(torch.equal(saved["eager"][name], saved["cuda"][name]) for name in saved["eager"])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_leave_floats_as_they_are(models: dict[str, Path], work: HostQueue, kind: str) -> None:
    """Quantised weights become panels for a GPU's kernels. All others, such as an lm_head, stay plain matrices."""
    cases = draw_cases(6, 3, most_prompt=20)
    with LLM(models["target"], quantization=kind, enable_prefix_caching=False, num_kv_blocks=500) as llm:
        outcomes = run_alone(llm.engine, cases)
    with LLM(models["target"], backend="cuda", quantization=kind, **LIMITS) as llm:
        decoder = llm.engine.loop.target.inner.step.decoder
        linears = [module for module in decoder.modules() if isinstance(module, Linear)]
        assert [linear.is_packed for linear in linears] == [linear is not decoder.head for linear in linears]
        assert run_together(llm.engine, cases).outcomes == outcomes
