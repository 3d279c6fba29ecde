"""Whole generation steps of compiled engines, against this machine's read bandwidth and against each other.

    python benchmarks/steps.py --work runs/steps --json steps.json
    python benchmarks/steps.py --only rows,start --model 40M --rounds 5

- rows: the target's own step when it verifies 0, 3 and 7 drafts of a request (1, 4 and 8 rows), with none accepted.
- eagle3: target and EAGLE3 head, K=3, next to plain decoding. Two drafts a step are accepted by force. The head drafts
  from
  4096 ids or from the whole vocabulary. Its weights are random, so only its time has a meaning.
- demo: the demo model and its trained head, K=3: whole steps, and the host's share of them at batch 1 and 32.
- start: fresh processes: constructor to first token, and peak memory beyond weights and KV pool.

`--model` is one of the Llama shapes of random weights of benchmarks/peers.py. Checkpoints and engines are made under
--work if they are missing, and made again when their inputs change.

Contestants of a section take turns in one process and one thread. The bandwidth is probed before and after each turn,
the order rotates, and the first round warms up. A turn's figure is the median of its steps. Ratios are taken within a
round, so that changes of the machine's speed between rounds cancel. Tables show medians over rounds, and their range.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # for `benchmarks.steps`, the package next to this file
    from benchmarks.steps.main import main

    sys.exit(main(__doc__))
