"""The contract of every mode: speculation changes nothing, and nothing is lost.

A cell is a mode with K drafts per step on a backend. Mixed greedy and seeded requests run together in a cache that is
too small for them. So prompts come in chunks next to drafts, requests are preempted, and stops fall inside drafts.
Outputs must be those of plain decoding of each request alone on the same backend. Drafts at every position must be
right sometimes and wrong sometimes. Every block of the cache must become free again.

These models are not trained. Their vocabulary is small, and at these temperatures the noise that target and draft share
determines most of what is drawn. So they agree often enough all the same.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dspark_checkpoints import make_dspark
from tests.e2e.tiny import (
    MASK,
    Case,
    LyingOracle,
    Outcome,
    add_tokenizer,
    assert_all_blocks_free,
    draw_cases,
    make_target,
    perturbed,
    run_alone,
    run_together,
)
from tests.head_checkpoints import make_dflash, make_eagle, make_eagle3, make_medusa, make_mlp_speculator
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.errors import DependencyError, UnsupportedError
from trtspec.interop.reading import read_speculative_config
from trtspec.modes import SpeculativeDecodingMode as M
from trtspec.outputs import or_none

MOST_K = 5
# 8 requests of up to 104 tokens in 14 blocks of 8, with at most 8 * (K + 1) rows per step.
LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 48, "block_size": 8}
TIGHT, ROOMY = {"num_kv_blocks": 15}, {"num_kv_blocks": 64}


@dataclass(frozen=True)
class Recipe:
    """A mode on the models of `Models`: its target, and the fields of its speculation."""

    fields: Mapping[str, Any]
    target: str = "target"
    draft: str | None = None  # folder of its checkpoint
    from_host: bool = False  # its drafter runs next to any plain engine

    def speculation(self, models: Models, K: int) -> dict[str, Any]:
        model = {} if self.draft is None else {"model": str(models.folder(self.draft))}
        drafter = {"drafter": models.oracle()} if self.fields["method"] == "custom_class" else {}
        return {**self.fields, **model, **drafter, "num_speculative_tokens": K}


RECIPES: dict[M, Recipe] = {
    M.MTP: Recipe({"method": "mtp", "vanilla": True}, "mimo of 5"),
    M.MTP_EAGLE: Recipe({"method": "mtp", "one_engine": False}, "mimo"),
    M.MTP_EAGLE_ONE_MODEL: Recipe({"method": "mtp"}, "mimo"),
    M.EAGLE3: Recipe({"method": "eagle3", "one_engine": False}, draft="eagle3"),
    M.EAGLE3_ONE_MODEL: Recipe({"method": "eagle3"}, draft="eagle3"),
    M.NGRAM: Recipe({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}, from_host=True),
    M.DRAFT_TARGET: Recipe({"method": "draft_model"}, draft="draft"),
    M.USER_PROVIDED: Recipe({"method": "custom_class"}, from_host=True),
    M.SUFFIX: Recipe({"method": "suffix"}, from_host=True),
    M.EAGLE: Recipe({"method": "eagle", "one_engine": False}, draft="eagle"),
    M.EAGLE_ONE_MODEL: Recipe({"method": "eagle"}, draft="eagle"),
    M.MEDUSA: Recipe({"method": "medusa"}, draft="medusa"),
    M.MLP_SPECULATOR: Recipe({"method": "mlp_speculator"}, draft="mlp_speculator"),
    M.DRAFT_TARGET_ONE_MODEL: Recipe({"method": "draft_model", "one_engine": True}, draft="draft"),
    M.PARD: Recipe({"method": "draft_model", "parallel_drafting": True}, draft="pard"),
    M.P_EAGLE: Recipe({"method": "eagle3", "parallel_drafting": True}, draft="p_eagle"),
    M.DFLASH: Recipe({"method": "dflash"}, draft="dflash"),
    M.DSPARK: Recipe({"method": "dspark"}, draft="dspark"),
}
# Modes without drafts of their own: no speculation, a mode that becomes another once planned, or hidden states.
WITHOUT_DRAFTS = {M.NONE, M.AUTO, M.SAVE_HIDDEN_STATES, M.GRAMMAR}  # GRAMMAR: tests/e2e/test_guided.py


def cases() -> list[Case]:
    """Return the cases: four of ten are greedy; the others are as drawn, but hot."""
    drawn = draw_cases(64, seed=3)
    return [
        Case(c.prompt, dataclasses.replace(c.params, temperature=4.0) if c.params.temperature else c.params)
        for c in drawn
    ]


class Models:
    """Checkpoints of random weights in `root`, engines of them, and their outputs without speculation.

    Each of them is made when it is first requested.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cases = cases()
        self.folder = functools.cache(self._folder)
        self.engine = functools.cache(self._engine)
        self.plain = functools.cache(self._plain)

    def oracle(self) -> LyingOracle:
        """Make a drafter that knows the answers, and lies."""
        answers = [
            case.prompt + one.token_ids for case, one in zip(self.cases, self.plain("target", "eager"), strict=True)
        ]
        return LyingOracle(answers, shorten=0.2)

    def _folder(self, name: str) -> Path:
        if name in ("target", "mimo", "mimo of 5"):
            arch = {
                "target": {},
                "mimo": {"arch": "mimo", "num_nextn_predict_layers": 1},
                "mimo of 5": {"arch": "mimo", "num_nextn_predict_layers": 5},
            }
            made = make_target(self.root, name=name, num_hidden_layers=3, **arch[name])
            add_tokenizer(made)
            return made
        target = self.folder("target")
        make: dict[str, Callable[[], Path]] = {
            "draft": lambda: perturbed(target, noise=0.15, folder=self.root),
            "pard": lambda: perturbed(target, noise=0.15, folder=self.root, name="pard", pard_token=MASK),
            "p_eagle": lambda: make_eagle3(self.root, target, (0, 1), name="p_eagle", num_layers=2, mask=MASK),
            "dflash": lambda: make_dflash(self.root, target, (0, 2), MASK),
            "dspark": lambda: make_dspark(self.root, target, (0, 2), MASK, markov="gated"),
            "eagle3": lambda: make_eagle3(self.root, target, (0, 1), (0, 9, 4, 12, 1, 2, 14, 5, 6, 11, 8, 3, 7)),
            "eagle": lambda: make_eagle(self.root, target),
            "medusa": lambda: make_medusa(self.root, target, num_heads=MOST_K),
            "mlp_speculator": lambda: make_mlp_speculator(self.root, target, n_predict=MOST_K),
        }
        return make[name]()

    def _engine(self, target: str, backend: str, mode: M, K: int) -> Path:
        """Build an engine folder; `open` requests the plain one for a mode whose drafter runs on the host."""
        output = self.root / f"{backend} {target} {mode.name} {K}".replace(" ", "-")
        wanted = None if mode is M.NONE else read_speculative_config(RECIPES[mode].speculation(self, K))
        build_engine(self.folder(target), output, wanted, EngineConfig(backend=backend, dtype="float32", **LIMITS))
        return output

    def _plain(self, target: str, backend: str) -> list[Outcome]:
        """Return the outcome of each case alone."""
        with self.open(M.NONE, 0, backend, target, **ROOMY) as llm:
            return run_alone(llm.engine, self.cases)

    def open(self, mode: M, K: int, backend: str, target: str, **options: Any) -> LLM:
        speculation = None if mode is M.NONE else RECIPES[mode].speculation(self, K)
        if backend in ("eager", "cuda"):
            return LLM(self.folder(target), speculation, backend=backend, dtype="float32", **LIMITS, **options)
        if mode is M.NONE or RECIPES[mode].from_host:
            return LLM(self.engine(target, backend, M.NONE, 0), speculation, **options)
        return LLM(self.engine(target, backend, mode, K), **options)


@dataclass(frozen=True)
class Cell:
    """The result of a cell. verdict: "holds", "refused: why", or what is wrong."""

    mode: str
    K: int
    backend: str
    verdict: str
    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    acceptance_length: float = 0.0
    acceptance: tuple[float, ...] = ()
    seconds: float = 0.0


def check(models: Models, mode: M, K: int, backend: str) -> Cell:
    """Check one cell. An exception that is not a refusal reaches the caller."""
    began = time.perf_counter()
    target = RECIPES[mode].target
    try:
        llm = models.open(mode, K, backend, target, **TIGHT)
    except (UnsupportedError, DependencyError) as error:
        return Cell(mode.name, K, backend, f"refused: {error}")
    with llm:
        run = run_together(llm.engine, models.cases)
        stats = run.speculation
        verdict = "; ".join(_wrong(run.outcomes, models.plain(target, backend), stats.acceptance_per_position, K, llm))
        return Cell(
            mode.name,
            K,
            backend,
            verdict or "holds",
            len(run.outcomes),
            sum(len(one.token_ids) for one in run.outcomes),
            llm.engine.stats.preemptions,
            round(or_none(stats.acceptance_length) or 0.0, 3),
            tuple(round(share, 3) for share in stats.acceptance_per_position),
            round(time.perf_counter() - began, 1),
        )


def _wrong(got: list[Outcome], want: list[Outcome], acceptance: tuple[float, ...], K: int, llm: LLM) -> Iterator[str]:
    differing = [i for i, (one, other) in enumerate(zip(got, want, strict=True)) if one != other]
    if differing:
        yield f"{len(differing)} outputs differ, the first is that of request {differing[0]}"
    if len(acceptance) != K or not all(0 < share < 1 for share in acceptance):
        yield f"acceptance {list(acceptance)}: not right now and then and wrong now and then at each of {K} positions"
    if not llm.engine.stats.preemptions:
        yield "nobody was preempted"
    if llm.engine.stats.drafter_failures:
        yield f"the drafter failed {llm.engine.stats.drafter_failures} times"
    try:
        assert_all_blocks_free(llm)
    except AssertionError as error:
        yield f"blocks are lost: {error}"
