"""Scores by which dynamic draft trees grow, compared by the accepted tokens at equal numbers of nodes.

    python benchmarks/tree_scores.py

The demo's EAGLE3 head on backend eager. "softmax" is what trtspec does (methods/tree_drafts.py): the softmax of logits
plus noise among siblings. "gap" is how far a node's logit plus noise is below that of the best sibling. The two know
the noise of the target's draw. "logits" is the draft's own probability, without the noise, as where drafts do not share
the target's noise. No table here depends on the speed of the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.peers.notes import origin
from examples.demo.__main__ import PROMPTS
from examples.demo.engines import HERE, TARGET
from trtspec import LLM, SamplingParams
from trtspec.core import SamplingTensors
from trtspec.methods import worker
from trtspec.methods.draw import draw_children, process
from trtspec.outputs import SpeculationStats

Score = Callable[[Tensor, SamplingTensors, Tensor, Tensor], Tensor]
"""(draft logits [R, Vd], how to sample, draft id of each child [R, n], logits plus noise [R, n]) -> scores [R, n].

The scores are put through the softmax among siblings.
"""
SCORES: dict[str, Score] = {
    "softmax": lambda logits, sampling, ids, noisy: noisy,
    # a softmax of values far apart is 1 for the best, and its logarithm is the gap for the others
    "gap": lambda logits, sampling, ids, noisy: 50 * noisy,
    "logits": lambda logits, sampling, ids, noisy: process(logits, sampling).log_softmax(1).gather(1, ids),
}
TREES = ((7, 4, 3), (7, 7, 2), (15, 5, 4))  # (nodes, depth, top_k)
TEMPERATURES = (0.0, 0.8, 1.0)


def acceptance(wishes: dict[str, Any], temperature: float, count: int) -> float:
    """Mean tokens per step of `count` requests."""
    spec = {"method": "eagle3", "model": str(HERE / "eagle3"), **wishes}
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=64) for i in range(count)]
    with LLM(TARGET, spec, backend="eager", max_batch_size=6, max_seq_len=1024, generation_config="off") as llm:
        outputs = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(count)], params, use_tqdm=False)
    return SpeculationStats.total(output.speculation for output in outputs).acceptance_length


def scored(score: Score) -> Callable[..., tuple[Tensor, Tensor]]:
    """draw_children with other scores."""

    def draw(
        logits: Tensor,
        sampling: SamplingTensors,
        target_ids: Tensor,
        draft_ids: Tensor,
        count: int,
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        children, noisy = draw_children(logits, sampling, target_ids, draft_ids, count)
        assert noisy is not None
        return children, score(logits, sampling, draft_ids[children].clamp(min=0), noisy)

    return draw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=36)
    count = parser.parse_args().requests
    print("| nodes, depth, top_k | score | " + " | ".join(f"T = {temperature}" for temperature in TEMPERATURES) + " |")
    print("|---|---|" + "---|" * len(TEMPERATURES))
    for nodes, depth, top_k in TREES:
        wishes = {
            "num_speculative_tokens": depth,
            "dynamic_tree_max_topK": top_k,
            "max_total_draft_tokens": nodes,
        }
        for name, score in SCORES.items():
            worker.draw_children = scored(score)  # type: ignore[attr-defined]
            cells = [f"{acceptance(wishes, temperature, count):.2f}" for temperature in TEMPERATURES]
            print(f"| {nodes}, {depth}, {top_k} | {name} | {' | '.join(cells)} |", flush=True)
    cells = [f"{acceptance({'num_speculative_tokens': 7}, temperature, count):.2f}" for temperature in TEMPERATURES]
    print(f"| a chain of 7 | | {' | '.join(cells)} |")
    print(
        "\n"
        + "\n".join(f"- {name}: {value}" for name, value in origin("benchmarks/tree_scores.py", sys.argv[1:]).items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
