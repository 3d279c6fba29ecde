"""Whole generation steps on an NVIDIA GPU, against the card's copy bandwidth and beside transformers.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --shapes 1B --only plain,rows --work runs/gpu --quick

plain         without speculation: a step's time on the device over the time to move the bytes it must move, what the
              device idles between two steps with the overlap scheduler and without, tokens/s
sampling      what temperature, top-k and top-p add to a greedy step
eagle3        target and EAGLE3 head in one launch, K=3, with 0, 1, 2 and 3 drafts accepted by force
rows          the target's step when it verifies 3 drafts of each request over its step without drafts
transformers  generate() on the same checkpoint, tokens/s

Llama shapes of 1B and 8B parameters and their heads have random weights, made on the card and written under --work:
it takes 20 GB of disk, and no network. Results go to --out, as JSON and markdown, after every section: a run that is
cut off leaves those of the sections before. A section that fails says so in them, and the others go on.

    make bench-gpu PYTHON=python3

runs it from a checkout with the given Python, in which torch with CUDA and what pyproject.toml asks for beside it are
installed, but not this package: it writes the entry points by which kernels are found (trtspec.egg-info) and lets
Python find plugins/ under its installed name. ARGS="--quick" has options.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # `benchmarks.gpu` is the package beside this file
    from benchmarks.gpu.main import main

    sys.exit(main(__doc__))
