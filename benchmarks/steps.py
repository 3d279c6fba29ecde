"""Whole generation steps of compiled engines, against this machine's read bandwidth and against each other.

    python benchmarks/steps.py --work runs/steps --json steps.json
    python benchmarks/steps.py --only rows,start --model 40M --rounds 5

rows     the target's own step when it verifies 0, 3 and 7 drafts a request (1, 4 and 8 rows), none accepted
eagle3   target and EAGLE3 head, K=3, two drafts accepted a step by force, beside plain decoding; the head draws from
         4096 ids or from all of the vocabulary. Its weights are random: it is timed, not believed
demo     the demo model and its trained head, K=3: whole steps, and the host's share of them at batch 1 and 32
start    fresh processes: constructor to first token, and peak memory beyond weights and KV pool

`--model` is one of the Llama shapes of random weights that benchmarks/peers.py has, too. Checkpoints and engines are
made under --work when they are missing, and made again when what they are made of changes.

Contestants of a section take turns in one process and one thread: probe the bandwidth, a turn, probe, the next one's
turn, in rotating order; the first round warms up. A turn's figure is the median of its steps; ratios are taken within a
round, so that what the machine's speed does between rounds cancels; tables show medians over rounds, and their range.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # `benchmarks.steps` is the package beside this file
    from benchmarks.steps.main import main

    sys.exit(main(__doc__))
