"""A real assistant: SmolLM2-135M-Instruct and the EAGLE3 head of examples/smollm2, on HumanEval and on chat prompts.

    python benchmarks/real.py acceptance
    python benchmarks/real.py speed --formats bf16 int8 --batches 1 8 --rounds 3
    python benchmarks/real.py peers --batches 1 8 --prompts 16

- acceptance: number of tokens that a step with drafts yields, for K = 3 and 5, greedy and at temperature 0.8. Drafts
  are those of EAGLE3, n-grams and suffixes.
- speed: tokens a second next to plain decoding, and next to what arithmetic allows. That is the acceptance length over
  the time of K + 1 rows and of the head, both in times of one row. All are measured in the same rounds.
- peers: the same model and the same head in llama.cpp's server, vLLM, OpenVINO GenAI and transformers, with every K and
  p_min asked for. Each has an environment of its own next to --work, made if it is missing (llama.cpp is compiled: many
  minutes). Time is that of all prompts and answers. As many requests run as the batch has: when one ends, the next
  starts. vLLM and OpenVINO have drafts only in greedy decoding, as their sampled texts are wrong with drafts.

Prompts are HumanEval's 164 problems and the held-out questions of examples/smollm2, through the model's chat template.
Answers end where the model ends them, or after --max-tokens. `speed` does not count prefill steps, nor steps in which
fewer requests run than the batch has. Engines take turns in rotating order. The first round warms up. Figures are
medians of the rounds, and ratios are medians of the rounds' ratios.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # for `benchmarks.real`, the package next to this file
    from benchmarks.real.main import main

    sys.exit(main(__doc__))
