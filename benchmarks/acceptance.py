"""Acceptance length of each draft of the demo for K = 1, 2, ...: a Markdown table as in examples/demo/MODEL_CARD.md.

Each draft is one run of `trtspec bench acceptance`: greedy, on held-out files. Its output equals plain decoding's, or
the run is an error. Lookups, which have no drafts in many steps, have a second row: tokens per step, where steps
without drafts count too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trtspec.cli.bench import figure

DEMO = Path(__file__).parents[1] / "examples" / "demo"

# name -> the target's folder, and its speculative_config
DRAFTS: dict[str, tuple[Path, dict[str, Any]]] = {
    "n-gram": (DEMO / "target", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
    "suffix": (DEMO / "target", {"method": "suffix"}),
    "draft model": (DEMO / "target", {"method": "draft_model", "model": str(DEMO / "draft")}),
    "EAGLE3": (DEMO / "target", {"method": "eagle3", "model": str(DEMO / "eagle3")}),
    "EAGLE": (DEMO / "target", {"method": "eagle", "model": str(DEMO / "eagle")}),
    "Medusa": (DEMO / "target", {"method": "medusa", "model": str(DEMO / "medusa")}),
    "MTP, one module": (DEMO / "mtp", {"method": "mtp"}),
}
LOOKUPS = ("n-gram", "suffix")
"""Methods that have no drafts if nothing like the last tokens came before."""
FIGURES = ("acceptance_length", "tokens_per_step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=[*DRAFTS], help="which (default: all)")
    parser.add_argument("--max-k", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--output-len", type=int, default=128)
    args = parser.parse_args()
    print(f"| draft | {' | '.join(f'K = {k}' for k in range(1, args.max_k + 1))} |")
    print(f"|---|{'---|' * args.max_k}")
    lossless = True
    for name in args.drafts:
        model, spec = DRAFTS[name]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            command = [sys.executable, "-m", "trtspec", "bench", "acceptance", "--model", str(model)]
            command += ["--spec", json.dumps({**spec, "num_speculative_tokens": args.max_k}), "--json", str(file)]
            command += [
                f"--{key.replace('_', '-')}={getattr(args, key)}" for key in ("max_k", "num_prompts", "output_len")
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            result = json.loads(file.read_text(encoding="utf-8"))
        lossless = lossless and result["lossless"]
        lengths, per_step = ([figure(row[key]) for row in result["by_k"]] for key in FIGURES)
        note = "" if result["lossless"] else " output differs from plain decoding"
        print(f"| {name} | {' | '.join(lengths)} |{note}", flush=True)
        if name in LOOKUPS:
            print(f"| {name}, tokens per step | {' | '.join(per_step)} |", flush=True)
    return 0 if lossless else 1


if __name__ == "__main__":
    sys.exit(main())
