"""Checks of whole engines of backend "cuda": test_gpu_engine.py runs them on a GPU, test_selfcheck.py on a stand-in.

Outputs are compared bit for bit with those of the same backend. With eager decoding on the CPU they are compared up to
near-ties. At the first difference of an output, the logit of the GPU's id is below that of the CPU's id by less than
rounding explains. The unit is the ulp of bf16 of the row's largest logit (tests/e2e/near_ties.py).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.contract.trees import NODES, TOP_K, TREE
from tests.e2e.conformance import CASES, LIMITS, TIGHT, K, assert_speculation_changes_nothing, build, wishes
from tests.e2e.near_ties import first_gaps
from tests.e2e.tiny import Case, Outcome, Run, assert_all_blocks_free, run_alone, run_together
from trtspec import LLM, SamplingParams
from trtspec.core import KVLayer
from trtspec.engine.overlap import OverlapLoop
from trtspec.engine.request import Request

DEMO = Path(__file__).parents[2] / "examples" / "demo"
WIDE: dict[str, Any] = {"max_batch_size": 8, "block_size": 4, "num_kv_blocks": 26}
"""Room for all requests and whole prompts."""

NEAR_TIES = {
    "float32": 0.01,  # 655 ulps of fp32: three to eight layers of sums in another order
    "bfloat16": 8.0,  # hidden states of 8 bits, rounded some 6 times a layer: at most this far from the CPU's
    # A number of x near the middle between two integers of 8 bits may round to the other one. That changes it by two
    # ulps of bf16 of its row's largest, four times as much as bf16 rounds.
    "float32 quantised": 8.0,
    "bfloat16 quantised": 32.0,
}
"""Bounds of a difference, in the unit of the module's docstring."""

PROMPTS = (
    "def read_config(filename):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\n\ndef ",
    "for name in sorted(names):\n    if name.startswith(",
    '"""Read a file and return its lines."""\n\nfrom __future__ import annotations\n\nimport re\n',
    "    def __repr__(self):\n        return ",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "while True:\n    line = ",
)


def demo_speculation(mode: str) -> dict[str, Any] | None:
    if mode == "none":
        return None
    if mode == "ngram":
        return {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": K}
    folder = {"draft": "draft", "eagle3": "eagle3"}[mode]
    method = {"draft": "draft_model", "eagle3": "eagle3"}[mode]
    return {"method": method, "model": str(DEMO / folder), "num_speculative_tokens": K}


def demo_cases(llm: LLM, max_tokens: int) -> list[Case]:
    """First lines of programs, greedy and sampled in turn."""
    assert llm.tokenizer is not None
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        Case(
            llm.tokenizer.encode(text),
            greedy if i % 2 else dataclasses.replace(greedy, temperature=0.8, top_p=0.95, seed=i),
        )
        for i, text in enumerate(PROMPTS)
    ]


def on_gpu(folder: Path, speculation: dict[str, Any] | None = None, **options: Any) -> LLM:
    return LLM(folder, speculation, backend="cuda", **options)


def alone(folder: Path, cases: Sequence[Case], **options: Any) -> list[Outcome]:
    """Outcomes of plain decoding on the GPU, of each case alone."""
    with on_gpu(folder, **{**WIDE, "enable_prefix_caching": False, **options}) as llm:
        return run_alone(llm.engine, cases)


def kv_of(llm: LLM) -> Sequence[KVLayer]:
    """The KV layers of the target's launch."""
    timed: Any = llm.engine.loop.target
    kv: Sequence[KVLayer] = timed.inner.kv
    return kv


def check_words_are_eager_s(
    folder: Path, cases: list[Case], theirs: list[Outcome], bound: float, **options: Any
) -> None:
    """Check that `theirs`, the GPU's outputs, are those of eager decoding on the CPU, or first differ in a near-tie."""
    with LLM(folder, **{**WIDE, "enable_prefix_caching": False, **options}) as eager:
        ours = run_alone(eager.engine, cases)
        gaps = first_gaps(eager.engine, cases, ours, theirs)
    assert max(gaps.values(), default=0.0) <= bound, gaps
    assert len(gaps) <= len(cases) // 2, f"{len(gaps)} of {len(cases)} outputs differ, each in a near-tie"


def check_graphs_change_nothing(
    folder: Path, speculation: dict[str, Any] | None, cases: list[Case], **options: Any
) -> Run:
    """Check that steps as CUDA graphs and kernel by kernel give the same ids and the same KV, bit for bit.

    All rows of KV that were written are compared, the target's and the draft layers'. KV of a layer depends on the
    outputs of all layers below it, and on the ids.
    """
    runs, caches = [], []
    for graphs in (True, False):
        with on_gpu(folder, speculation, enable_cuda_graph=graphs, **{**WIDE, **options}) as llm:
            runs.append(run_together(llm.engine, cases))
            caches.append([tensor[1:].cpu() for layer in kv_of(llm) for tensor in layer])  # without the scratch block
            assert bool(llm.engine.loop.target.inner._captured) == graphs  # type: ignore[attr-defined]
    assert runs[0].outcomes == runs[1].outcomes
    assert any(tensor.any() for tensor in caches[0])
    assert all(map(torch.equal, *caches))
    return runs[0]


def check_any_order_changes_nothing(
    folder: Path, speculation: dict[str, Any] | None, cases: list[Case], seed: int, **options: Any
) -> None:
    """Check arrivals, stops and aborts in random order, with the next step launched ahead and without.

    Ids must be plain decoding's; those of an aborted request must begin plain decoding's. The accounting of KV must be
    right after every step.
    """
    outcomes = alone(folder, cases, **options)
    for waits in (False, True):
        tight = {**LIMITS, **TIGHT, "debug": True, "disable_overlap_scheduler": waits, **options}
        with on_gpu(folder, speculation, **tight) as llm:
            assert isinstance(llm.engine.loop, OverlapLoop) != waits
            requests, aborted = run_in_any_order(llm, cases, seed)
            assert_all_blocks_free(llm)
        assert aborted
        for number, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            if number in aborted:
                assert request.output_ids == outcome.token_ids[: len(request.output_ids)]
            else:
                assert Outcome.of(request) == outcome


def run_in_any_order(llm: LLM, cases: Sequence[Case], seed: int) -> tuple[list[Request], set[int]]:
    """Requests, and the numbers of those that were aborted before they had ended."""
    rng, pending = random.Random(seed), list(cases)
    requests: list[Request] = []
    aborted: set[int] = set()
    while pending or llm.engine.has_work:
        event = rng.random()
        if pending and event < 0.2:
            requests += llm.engine.add_request(pending[0].prompt, pending.pop(0).params)
        elif event < 0.25 and requests:
            number = rng.randrange(len(requests))
            if llm.engine.abort(requests[number].request_id) is not None:
                aborted.add(number)
        elif llm.engine.has_work:
            llm.engine.step()
    return requests, aborted


def check_prefixes_are_found(folder: Path, speculation: dict[str, Any] | None, **options: Any) -> None:
    """Check prompts that begin alike, one after the other: their blocks are reused, and the ids stay the same."""
    rng = random.Random(1)
    base = [rng.randrange(1, 16) for _ in range(41)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    cases = [Case([*base[:length], 1 + base[length] % 15, 3], params) for length in (40, 7, 16, 31, 40)]
    with on_gpu(folder, speculation, **{**WIDE, **options}) as llm:
        outcomes = run_alone(llm.engine, cases)
        assert llm.engine.stats.prefix_hit_tokens >= 2 * 4 * 4
    assert outcomes == alone(folder, cases, **options)


def check_engine_folders(models: Path, output: Path, dtype: str) -> None:
    """Check folders that AOTInductor compiled for the GPU: words are eager's, and EAGLE3 changes none of them."""
    with LLM(build(models, output / "plain", "cuda", "none", dtype), num_kv_blocks=300) as llm:
        plain = run_alone(llm.engine, CASES)
    check_words_are_eager_s(models / "target", CASES, plain, NEAR_TIES[dtype], dtype=dtype)
    with LLM(build(models, output / "eagle3", "cuda", "eagle3", dtype), **TIGHT) as llm:
        assert_speculation_changes_nothing(llm, plain, "eagle3")


TREES: dict[str, dict[str, Any]] = {
    "static": {"num_speculative_tokens": None, "speculative_token_tree": TREE},
    "dynamic": {"max_total_draft_tokens": NODES, "dynamic_tree_max_topK": TOP_K},
}


def check_trees_change_nothing(models: Path, mode: str, shape: str, **options: Any) -> None:
    """Check 60 mixed requests with draft trees of 10 nodes, in a cache that is too small for them."""
    plain = alone(models / "target", CASES, **options)
    wanted = {**wishes(mode, models, False), **TREES[shape]}
    sizes = {**LIMITS, "max_num_tokens": 8 * (NODES + 1), "num_kv_blocks": 26}
    with on_gpu(models / "target", wanted, **sizes, **options) as llm:
        run = run_together(llm.engine, CASES)
        assert_all_blocks_free(llm)
        assert llm.engine.stats.preemptions > 0
    assert run.outcomes == plain
    assert run.speculation.num_accepted_tokens > len(CASES)


def check_chunks_change_nothing(folder: Path, speculation: dict[str, Any] | None, **options: Any) -> None:
    """Check prompts of 20 to 90 tokens in chunks of at most 32 rows, and of 7, next to each other's generations."""
    rng = random.Random(2)
    sampled = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    cases = [
        Case([rng.randrange(1, 16) for _ in range(length)], dataclasses.replace(sampled, seed=length))
        for length in (90, 20, 61, 33)
    ]
    whole = alone(folder, cases, **options)
    for rows in (32, 7):
        limits = {"max_batch_size": 4 if rows > 7 else 1, "max_num_tokens": rows}
        with on_gpu(folder, speculation, **{**WIDE, **limits, **options}) as llm:
            run = run_together(llm.engine, cases)
        assert run.outcomes == whole
        assert any(emission.is_context and not emission.tokens for step in run.steps for emission in step)
