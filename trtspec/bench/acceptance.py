"""Acceptance length by K: tokens per step with drafts, and the share of drafts kept at each position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtspec.bench.decode import versions
from trtspec.build.engine_folder import EngineFolder
from trtspec.llm import LLM
from trtspec.outputs import SpeculationStats, or_none
from trtspec.sampling_params import SamplingParams


def bench_acceptance(
    model: str | Path,
    speculative_config: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    ks: Iterable[int] = range(1, 9),
    progress: Callable[[str], None] = lambda message: None,
    **engine_options: Any,
) -> dict[str, Any]:
    """Generate for all prompts (token ids) with each K in turn, and once without speculation.

    The speculative_config's own K is ignored. A checkpoint runs op by op unless engine_options name a backend:
    acceptance is the same, and nothing is compiled for each K.

    Returns a JSON-ready dict of the settings and these results:
    - `by_k`: a dict for each K, described below.
    - `lossless`: whether every K gave the tokens of plain decoding.

    The dict for one K has:
    - acceptance_length: mean tokens per step that had drafts, bonus included; None if no step had drafts.
    - tokens_per_step: mean over all generation steps.
    - acceptance_per_position [K]: share of the drafts offered at each position that were kept.
    - steps; num_drafts (steps that had drafts); tokens.
    """
    if EngineFolder.open(model) is None:
        engine_options = {"backend": "eager", **engine_options}
    progress("plain decoding")
    plain, _ = _generate(model, None, prompts, params, engine_options)
    rows, lossless = [], True
    for k in ks:
        progress(f"K = {k}")
        config = {**speculative_config, "num_speculative_tokens": k}
        outputs, stats = _generate(model, config, prompts, params, engine_options)
        lossless = lossless and outputs == plain
        rows.append(
            {
                "k": k,
                "acceptance_length": or_none(stats.acceptance_length),
                "tokens_per_step": or_none(stats.tokens_per_step),
                "acceptance_per_position": stats.acceptance_per_position,
                "steps": stats.steps,
                "num_drafts": stats.num_drafts,
                "tokens": sum(map(len, outputs)),
            }
        )
    return {
        "model": str(model),
        "speculation": dict(speculative_config),
        "prompts": len(prompts),
        "input_len": [len(prompt) for prompt in prompts],
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "by_k": rows,
        "lossless": lossless,
        "versions": versions(),
    }


def _generate(
    model: str | Path,
    speculative_config: Mapping[str, Any] | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    engine_options: Mapping[str, Any],
) -> tuple[list[list[int]], SpeculationStats]:
    with LLM(model, speculative_config, **engine_options) as llm:
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs], SpeculationStats.total(o.speculation for o in outputs)
