"""trtspec next to vLLM-CPU, transformers and llama.cpp: same checkpoints, same prompts, repeats in turn.

    python benchmarks/peers.py --work runs/peers --markdown peers.md --json peers.json --png peers.png
    python benchmarks/peers.py --only llama --model 40M --what plain,prefill --repeats 3

Each peer has an environment of its own: one given by --vllm-python, --transformers-python or --llama-python, or one
under --work, which is made if it is missing. llama.cpp is compiled for this machine, which takes minutes and a C++
compiler; vLLM and transformers download torch.

The checkpoints are the demo models, whose prompts are held-out code, and two Llama shapes of random weights. The latter
are written under --work too; peers/checkpoints.py explains how their text stays the same in every engine. All engines
decode greedily, 128 tokens in and 128 out, past any end of sequence, with the same number of threads. vLLM takes part
twice: with processes of its own, as by default, and all in one process (--vllm-modes chooses).

Every contestant is a process that loads once. A repeat runs each in turn, in rotating order, while all others stand
still. It probes the machine's read bandwidth before, between and after them. The first repeat warms up. Figures are
medians, and ratios are medians of the ratios of single repeats. `of probe` is a contestant's bytes of weights per
second of plain decoding over the mean of the two probes around its turn: median and range over the repeats.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # for `benchmarks.peers`, the name that the workers use
    from benchmarks.peers.main import main

    sys.exit(main(__doc__))
