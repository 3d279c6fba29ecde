"""Whole generation steps on an NVIDIA GPU, against the card's copy bandwidth and next to transformers.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --shapes 1B --only plain,rows --work runs/gpu --quick

- plain: steps without speculation: time on the device over the time to move the bytes that the step must move, and
  tokens/s. Also the device's idle time between two steps, with the overlap scheduler and without.
- sampling: time that temperature, top-k and top-p add to a greedy step.
- eagle3: target and EAGLE3 head in one launch, K=3, with 0, 1, 2 and 3 drafts accepted by force.
- rows: the target's step when it verifies 3 drafts of each request, over its step without drafts.
- transformers: generate() on the same checkpoint, tokens/s.
- linears: those of a layer, in every format, for 1 to 2048 rows, next to torch's in bf16.
- attention: of generations with 1k to 32k tokens, and of prompts, next to torch's.

The Llama shapes of 1B and 8B parameters and their heads have random weights, made on the card and written under --work.
They take 20 GB of disk, and no network. Results go to --out, as JSON and markdown, after every section. A run that is
cut off leaves those of the sections before. If a section fails, the results say so, and the other sections still run.

    make bench-gpu PYTHON=python3

runs it from a checkout with the given Python. That Python needs torch with CUDA and the other packages that
pyproject.toml asks for, but not this package. The command writes the entry points by which kernels are found
(trtspec.egg-info) and lets Python find plugins/ under its installed name. ARGS="--quick" passes options.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # for `benchmarks.gpu`, the package next to this file
    from benchmarks.gpu.main import main

    sys.exit(main(__doc__))
