"""Writes a random DFlash draft by the speculators package's own classes and its logits; or an MTP layer alone.

    python speculators_blocks_oracle.py TARGET OUT OPTIONS

TARGET: the target's folder. OPTIONS: JSON with fields of DFlashSpeculatorConfig, and `layer` with fields of its
transformer_layer_config. `bits` and `ignore` are those of save_quantised in speculators_quantised.py.

The script writes the draft to OUT, as the package saves it, and oracle.npz. This file has ids [S + 1], states [S, n *
H], anchors [A], and logits [A, block_size, Vd] of the blocks that begin at the anchors. The package's forward pass is
for training and samples its anchors. So the script runs its backbone with a loss mask that leaves it one anchor.

With `mtp` among the options, the model_type of a layer, the script writes an MTP layer. It then also writes mtp.json,
the model_types for which the package has such layers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.models.mtp.core import MTPDraftModel
from speculators.models.mtp.model_definitions import mtp_model_classes
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators_oracle import choose_ids, randomised, save

ANCHORS = (1, 9, 23)


def main(target: Path, out: Path, options: dict[str, Any]) -> None:
    own = json.loads((target / "config.json").read_text())
    if "mtp" in options:
        write_mtp(own, out, str(options["mtp"]))
        return
    shape = {key: own[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters")}  # fmt: skip
    bits, ignore = options.pop("bits", None), options.pop("ignore", ["lm_head", "verifier_lm_head"])
    layer = {"model_type": "qwen3", **dict(options.pop("layer", {}))}
    kind = transformers.AutoConfig.for_model(layer.pop("model_type")).__class__
    config = DFlashSpeculatorConfig(
        transformer_layer_config=kind(**{**shape, "num_hidden_layers": 2, **layer}),
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=options["block_size"] - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=own["architectures"]),
        ),
        **options,
    )
    config.transformer_layer_config._attn_implementation = "eager"
    draft = randomised(DFlashDraftModel(config))
    vocab, weights = shape["vocab_size"], load_file(target / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    draft.embed_tokens.weight.copy_(embedding)  # as load_verifier_weights does for a name on the Hub
    if draft.d2t is None:
        draft.lm_head.weight.copy_(weights.get("lm_head.weight", embedding))
    else:
        choose_ids(draft, vocab)
    save(draft, out, bits, ignore)
    ids, states = torch.randint(0, vocab, (max(ANCHORS) + 1,)), torch.randn(max(ANCHORS), draft.fc.in_features)
    logits = torch.stack([block(draft, ids, states, anchor) for anchor in ANCHORS])
    np.savez(out / "oracle.npz", ids=ids, states=states, anchors=np.array(ANCHORS), logits=logits)


def write_mtp(own: dict[str, Any], out: Path, model_type: str) -> None:
    layer = transformers.AutoConfig.for_model(model_type, **{key: own[key] for key in ("vocab_size", "hidden_size")})
    speculation = SpeculatorsConfig(
        algorithm="mtp",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=own["architectures"]),
    )
    MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=speculation)).save_pretrained(
        out
    )
    (out / "mtp.json").write_text(json.dumps(sorted(mtp_model_classes)))


@torch.no_grad()
def block(draft: DFlashDraftModel, ids: torch.Tensor, states: torch.Tensor, anchor: int) -> torch.Tensor:
    """Return logits [block_size, Vd] of the block at ids[anchor]; states from the anchor on are not the target's."""
    length = anchor + draft.block_size + 1
    read, text = torch.full((1, length, states.shape[1]), 1e3), torch.zeros(1, length, dtype=torch.long)
    read[0, :anchor], text[0, : anchor + 1] = states[:anchor], ids[: anchor + 1]
    mask, last = torch.zeros(1, length), torch.zeros(1, length, draft.hidden_size)
    mask[0, anchor] = 1
    documents = torch.zeros(1, length, dtype=torch.long)
    return draft._backbone_forward(read, text, mask, last, documents, None, max_anchors=1)[1][0]


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
