"""Records in an .npz what the classes of the package `speculators` compute for tests/models/dspark_cases.py.

The package cannot be installed together with the project's pinned packages, so this script runs in its own environment:

    python -m venv oracle && oracle/bin/pip install speculators==0.9.0
    oracle/bin/python -m tests.models.dspark_oracle

The package has no inference: its forward pass is teacher-forced and samples anchors. So this script passes its backbone
one anchor, a mask that allows no other anchor, and as many positions after it as a block has. Then it runs the
package's heads draft by draft.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from torch import Tensor

from tests.models.dspark_cases import BLOCK, CASES, LENGTHS, RECORDED, inputs, make_case, make_target


def load(tmp_path: Path, target: Path, name: str) -> Any:
    """Load the package's model of a case, fp32."""
    proposals = [{"proposal_type": "greedy", "speculative_tokens": BLOCK}]
    folder = make_case(
        tmp_path,
        target,
        name,
        speculators_config={
            "algorithm": "dspark",
            "proposal_methods": proposals,
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": str(target), "architectures": ["Qwen3ForCausalLM"]},
        },
    )
    config = DSparkSpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return DSparkDraftModel.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()


def block(model: Any, states: Tensor, text: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
    """Run one block -> h [BLOCK, H] after the last norm, and lm_head's logits [BLOCK, Vd]."""
    length = anchor + BLOCK + 1
    hidden = torch.zeros(1, length, states.shape[1])
    hidden[0, :anchor] = states[:anchor]
    ids = torch.full((1, length), model.mask_token_id)
    ids[0, : anchor + 1] = text[: anchor + 1]
    mask = torch.zeros(1, length)
    mask[0, anchor] = 1
    last, documents = torch.zeros(1, length, model.hidden_size), torch.zeros(1, length, dtype=torch.long)
    h, logits, *_ = model._backbone_forward(hidden, ids, mask, last, documents, None, max_anchors=1)
    return h[0], logits[0]


@torch.no_grad()
def drafts(model: Any, states: Tensor, text: Tensor, anchor: int) -> dict[str, Tensor]:
    """Draft greedily from left to right -> ids, logits and, if there is a confidence head, confidences."""
    h, base = block(model, states, text, anchor)
    first = 0 if model.config.sample_from_anchor else 1
    previous, ids, logits = torch.full((BLOCK,), int(text[anchor])), [], []
    for row in range(first, BLOCK):
        if row > first:
            previous[row] = ids[-1]
        biased = base
        if model.markov_head is not None:
            biased = base + model.markov_head.block_bias(prev_token_ids=previous[None], hidden_states=h[None])[0]
        logits.append(biased[row])
        best = int(biased[row].argmax())
        ids.append(best if model.d2t is None else best + int(model.d2t[best]))
    found = {"ids": torch.tensor(ids), "logits": torch.stack(logits)}
    if model.confidence_head is not None:
        read = h
        if model.config.confidence_head_with_markov:
            read = torch.cat((h, model.markov_head.prev_embeddings(previous)), dim=-1)
        found["confidences"] = model.confidence_head(read)[first:].sigmoid().flatten()
    return found


def main() -> None:
    """Record all cases."""
    recorded = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            model = load(Path(scratch), make_target(Path(scratch) / "target"), name)
            states, text = inputs(name)
            for anchor in LENGTHS:
                for what, value in drafts(model, states, text, anchor).items():
                    recorded[f"{name}/{anchor}/{what}"] = value.numpy()
    np.savez_compressed(RECORDED, **recorded)  # type: ignore[arg-type]
    print(f"{len(recorded)} arrays, {RECORDED.stat().st_size} bytes in {RECORDED}")


if __name__ == "__main__":
    main()
