"""A random head by the speculators package's own classes, and what it computes.

    python speculators_oracle.py TARGET OUT OPTIONS

TARGET: the target's folder. OPTIONS: JSON, of Eagle3SpeculatorConfig, and `layer` of its transformer_layer_config.
Writes the head to OUT, as the package saves it, and oracle.npz: ids [S], states [S, n * H], logits [2, S, Vd] of two
passes, the second on the ids after those of the first and on the first's output (see Eagle3DraftModel.forward). With a
mask_token_id it is a P-EAGLE head, which is written and not run: the package has no pass like ours. `bits` and
`ignore`: see speculators_quantised.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

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


def main(target: Path, out: Path, options: dict[str, object]) -> None:
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
    torch.manual_seed(0)
    head = (PEagleDraftModel if parallel else Eagle3DraftModel)(config).float().eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2 if parameter.ndim < 2 else (2 / parameter.shape[1]) ** 0.5)
    vocab, size = shape["vocab_size"], config.draft_vocab_size
    if head.d2t is not None:
        chosen = torch.randperm(vocab)[:size].sort().values
        head.d2t.copy_(chosen - torch.arange(size))
        head.t2d.zero_()[chosen] = True
    if bits is None:
        head.save_pretrained(out)
    else:
        from speculators_quantised import save_quantised  # what that imports needs Python 3.11

        save_quantised(head, out, bits, ignore)
    if parallel:
        return
    ids, states = torch.randint(0, vocab, (ROWS,)), torch.randn(ROWS, head.fc.in_features)
    logits: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda module, given, result: logits.append(result[0].detach()))
    with torch.no_grad():
        documents = torch.zeros(1, ROWS, dtype=torch.long)
        head(states[None], ids[None], documents, ttt_steps=2)
    np.savez(out / "oracle.npz", ids=ids, states=states, logits=torch.stack(logits))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
