"""Writes a random head by the speculators package's own classes, and its logits.

    python speculators_oracle.py TARGET OUT OPTIONS

TARGET: the target's folder. OPTIONS: JSON with fields of Eagle3SpeculatorConfig, and `layer` with fields of its
transformer_layer_config. `bits` and `ignore` are those of save_quantised in speculators_quantised.py.

The script writes the head to OUT, as the package saves it, and oracle.npz. This file has ids [S], states [S, n * H],
and logits [2, S, Vd] of two passes. The second pass reads the ids after those of the first, and the first's output, as
Eagle3DraftModel.forward does. With a mask_token_id it is a P-EAGLE head, which is written and not run, because the
package has no pass like trtspec's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig

ROWS = 24


def main(target: Path, out: Path, options: dict[str, Any]) -> None:
    own = json.loads((target / "config.json").read_text())
    shape = {key: own[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters")}  # fmt: skip
    layer = {"model_type": "llama", **dict(options.pop("layer", {}))}
    kind = transformers.AutoConfig.for_model(layer.pop("model_type")).__class__
    bits, ignore = options.pop("bits", None), options.pop("ignore", ["lm_head", "verifier_lm_head"])
    parallel = "mask_token_id" in options
    config = (PEagleSpeculatorConfig if parallel else Eagle3SpeculatorConfig)(
        transformer_layer_config=kind(**{**shape, "num_hidden_layers": 1, **layer}),
        speculators_config=SpeculatorsConfig(
            algorithm="peagle" if parallel else "eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=own["architectures"]),
        ),
        **options,
    )
    config.transformer_layer_config._attn_implementation = "eager"
    head = randomised((PEagleDraftModel if parallel else Eagle3DraftModel)(config))
    if head.d2t is not None:
        choose_ids(head, shape["vocab_size"])
    save(head, out, bits, ignore)
    if parallel:
        return
    ids, states = torch.randint(0, shape["vocab_size"], (ROWS,)), torch.randn(ROWS, head.fc.in_features)
    logits: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda module, given, result: logits.append(result[0].detach()))
    with torch.no_grad():
        documents = torch.zeros(1, ROWS, dtype=torch.long)
        head(states[None], ids[None], documents, ttt_steps=2)
    np.savez(out / "oracle.npz", ids=ids, states=states, logits=torch.stack(logits))


@torch.no_grad()
def randomised(head: Any) -> Any:
    """Set weights that are neither 0 nor 1, in fp32 -> head."""
    torch.manual_seed(0)
    for name, parameter in head.float().eval().named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 0.2 if parameter.ndim < 2 else (2 / parameter.shape[1]) ** 0.5)
    return head


def choose_ids(head: Any, vocab_size: int) -> None:
    """Choose the ids that the head drafts, at random."""
    size = head.config.draft_vocab_size
    chosen = torch.randperm(vocab_size)[:size].sort().values
    head.d2t.copy_(chosen - torch.arange(size))
    head.t2d.zero_()[chosen] = True


def save(head: Any, out: Path, bits: int | None, ignore: list[str]) -> None:
    """Save the head as the package does, or, with `bits`, as llm-compressor does."""
    if bits is None:
        head.save_pretrained(out)
    else:
        from speculators_quantised import save_quantised  # its imports need Python 3.11

        save_quantised(head, out, bits, ignore)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
