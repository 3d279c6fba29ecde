"""The contract of draft trees: ids are plain decoding's, nothing is lost. modes.py has that of chains."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from tests.contract.modes import RECIPES, Models
from tests.e2e.tiny import Case, Outcome, assert_all_blocks_free, draw_cases, run_alone, run_together
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.core import StepInputs
from trtspec.engine.batch import InputBuilder
from trtspec.engine.scheduler import Batch
from trtspec.interop.reading import read_speculative_config
from trtspec.modes import SpeculativeDecodingMode as M

MODES = [mode for mode in RECIPES if mode.drafts_trees()]
DYNAMIC = [*MODES, M.NGRAM, M.SUFFIX]
TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1)]"
DEPTH, NODES = 3, 10
TOP_K = 3  # of dynamic trees
WISHES: dict[M, dict[str, Any]] = {  # of trees alone, so that few matches make branches
    M.SUFFIX: {"suffix_decoding_min_token_prob": 0.0, "suffix_decoding_max_spec_factor": 3.0},
}
BUILT = ("aoti", "onnx")
"""Backends whose engines are built first, as they run no checkpoints."""
DTYPES, BATCHES = ("float32", "bfloat16"), (1, 8)
LIMITS: dict[str, Any] = {"max_num_tokens": 8 * (NODES + 1), "block_size": 4}
TIGHT, ROOMY = {"num_kv_blocks": 29}, {"num_kv_blocks": 64}


@dataclasses.dataclass(frozen=True)
class TreeCell:
    """The result of a cell. shape: "static" or "dynamic". verdict: "holds", or what is wrong."""

    mode: str
    shape: str
    backend: str
    dtype: str
    batch: int
    verdict: str
    acceptance: tuple[float, ...] = ()
    preemptions: int = 0


class Watched:
    """An InputBuilder that notes requests with rows past their blocks, where no row may be."""

    def __init__(self, inner: InputBuilder, past: list[str]) -> None:
        self.inner, self.past = inner, past

    def build(self, batch: Batch, next_draft_len: int = 0) -> StepInputs:
        for request, num_rows, draft_len, _ in batch:
            end, rows = request.num_scheduled_tokens + num_rows, len(request.kv.blocks) * LIMITS["block_size"]
            if end > rows:
                self.past.append(f"request {request.request_id}, {draft_len} drafts up to row {end} of {rows}")
        return self.inner.build(batch, next_draft_len)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Trees:
    """Engines with draft trees and without, and the outputs without them.

    count: number of requests, of which some are greedy and the others hot.
    """

    def __init__(self, root: Path, count: int) -> None:
        self.models = Models(root)
        self.cases = [
            Case(c.prompt, dataclasses.replace(c.params, temperature=4.0 if c.params.temperature else 0.0))
            for c in draw_cases(count, seed=3)
        ]
        self.plain = functools.cache(self._plain)
        self.folder = functools.cache(self._folder)

    def _folder(self, mode: M, shape: str, target: str, backend: str, dtype: str) -> Path:
        output = self.models.root / f"tree {target} {mode.name} {shape} {backend} {dtype}".replace(" ", "-")
        wanted = None if mode is M.NONE else read_speculative_config(self._speculation(mode, shape))
        config = EngineConfig(backend=backend, dtype=dtype, max_batch_size=max(BATCHES), **LIMITS)
        build_engine(self.models.folder(target), output, wanted, config)
        return output

    def _speculation(self, mode: M, shape: str) -> dict[str, Any]:
        wishes = {**RECIPES[mode].speculation(self.models, DEPTH), **WISHES.get(mode, {})}
        if shape == "static":
            return {**wishes, "speculative_token_tree": TREE}
        grown = {"dynamic_tree_max_topK": TOP_K} if mode in MODES else {}
        return {**wishes, **grown, "max_total_draft_tokens": NODES}

    def _open(self, mode: M, shape: str, target: str, backend: str, dtype: str, batch: int, **options: Any) -> LLM:
        if backend in BUILT:
            return LLM(self.folder(mode, shape, target, backend, dtype), max_batch_size=batch, **options)
        speculation = None if mode is M.NONE else self._speculation(mode, shape)
        options |= {"backend": backend, "dtype": dtype, "max_batch_size": batch, **LIMITS}
        return LLM(self.models.folder(target), speculation, **options)

    def _plain(self, target: str, backend: str, dtype: str) -> list[Outcome]:
        with self._open(M.NONE, "", target, backend, dtype, max(BATCHES), **ROOMY) as llm:
            return run_alone(llm.engine, self.cases)

    def check(self, mode: M, shape: str, backend: str, dtype: str, batch: int) -> TreeCell:
        """Check one cell. A batch of several runs in a cache that is too small for it."""
        target = RECIPES[mode].target
        with self._open(mode, shape, target, backend, dtype, batch, **(TIGHT if batch > 1 else ROOMY)) as llm:
            past: list[str] = []
            llm.engine.loop.input_builder = Watched(llm.engine.loop.input_builder, past)  # type: ignore[assignment]
            run = run_together(llm.engine, self.cases)
            shares = run.speculation.acceptance_per_position
            wrong = []
            pairs = zip(run.outcomes, self.plain(target, backend, dtype), strict=True)
            if differing := [i for i, (one, other) in enumerate(pairs) if one != other]:
                wrong.append(f"{len(differing)} outputs differ, the first is that of request {differing[0]}")
            if len(shares) != DEPTH or not all(0 < share < 1 for share in shares):
                wrong.append(f"acceptance {list(shares)}: not right now and then, and wrong, at each of {DEPTH} depths")
            if past:
                wrong.append(f"rows past a request's blocks: {past[0]}")
            if batch > 1 and not llm.engine.stats.preemptions:
                wrong.append("nobody was preempted")
            try:
                assert_all_blocks_free(llm)
            except AssertionError as error:
                wrong.append(f"blocks are lost: {error}")
            rounded = tuple(round(share, 3) for share in shares)
            verdict = "; ".join(wrong) or "holds"
            return TreeCell(mode.name, shape, backend, dtype, batch, verdict, rounded, llm.engine.stats.preemptions)
