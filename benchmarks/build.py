"""How long engines take to build, by the number of layers, and what cutting the decoder into blocks costs per step.

    python benchmarks/build.py [--layers 30 60] [--whole] [--repeats 7]

The model is a Llama of random weights: hidden size 576, 9 heads, 3 of them for keys and values, 49152 ids, tied, bf16.
It has 135M parameters with 30 layers. Every build is a process of its own with an empty compiler cache. The seconds are
those of the build, without Python's imports. With --whole each engine is built once more as whole graphs. Steps then
alternate between the two engines, with one request, and the ratio is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from trtspec import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import json, sys, time
from trtspec.backends.aoti import cut
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.interop.reading import read_speculative_config
model, output, speculation, least = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
cut.LEAST_LAYERS = least or cut.LEAST_LAYERS
begin = time.perf_counter()
build_engine(model, output, read_speculative_config(speculation), EngineConfig(backend="aoti"))
print(time.perf_counter() - begin)
"""


def make_model(folder: Path, layers: int) -> Path:
    """Write a checkpoint with that number of layers, and return its folder."""
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=layers,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / f"llama{layers}")
    return folder / f"llama{layers}"


def build(model: Path, output: Path, speculation: object, whole: bool = False) -> float:
    """Build an engine in a process of its own, and return the seconds that it took."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(model), str(output), json.dumps(speculation), str(1000 if whole else 0)],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"the build failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.splitlines()[-1])


def compare_steps(cut: Path, whole: Path, repeats: int) -> tuple[float, float, bool]:
    """Return ms of a step of whole graphs, the ratio of the cut engine's to it, and whether their ids agree."""
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    engines = [LLM(folder, max_batch_size=4) for folder in (whole, cut)]
    ids, times = [], []
    for _ in range(repeats + 1):
        pair = []
        for llm in engines:
            begin = time.perf_counter()
            (output,) = llm.generate([[1, 2, 3, 4]], params, use_tqdm=False)
            steps = output.speculation.steps or params.max_tokens
            pair.append((time.perf_counter() - begin) / steps * 1e3)
            ids.append(output.outputs[0].token_ids)
        times.append(pair)
    for llm in engines:
        llm.shutdown()
    ratio = statistics.median(mine / theirs for theirs, mine in times[1:])
    return statistics.median(theirs for theirs, _ in times[1:]), ratio, all(one == ids[0] for one in ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[30, 60])
    parser.add_argument("--whole", action="store_true", help="build whole graphs, too, and compare steps")
    parser.add_argument("--repeats", type=int, default=7, help="of what is timed next to a whole graph")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.head_checkpoints import make_eagle3

    print("| engine | layers | build, s | whole graphs, s | their step, ms | a cut step | same ids |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for layers in arguments.layers:
            model = make_model(folder, layers)
            head = make_eagle3(folder, model, name=f"eagle{layers}")
            eagle3 = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
            for name, speculation in (("plain, n-gram, suffix", None), ("EAGLE3, K = 3", eagle3)):
                output = folder / f"{name[:5]}{layers}"
                cells = [f"{build(model, output, speculation):.1f}"]
                if arguments.whole:
                    whole = output.with_suffix(".whole")
                    cells.append(f"{build(model, whole, speculation, whole=True):.1f}")
                    step, ratio, same = compare_steps(output, whole, arguments.repeats)
                    cells += [f"{step:.2f}", f"{ratio:.3f}", "yes" if same else "NO"]
                print(f"| {name} | {layers} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
