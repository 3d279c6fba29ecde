"""N-gram, a draft model and EAGLE3 next to plain decoding on the demo models, code completion: `make bench`.

Each row is one `trtspec bench decode`, whose repeats alternate with plain decoding in the same process. So the ratios
hold on a machine whose speed drifts. It prints a markdown table; the JSON files hold the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from trtspec.cli.bench import figure

DEMO = Path(__file__).parents[1] / "examples" / "demo"
MODES = {
    "n-gram, K=3": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "draft model, K=3": {"method": "draft_model", "model": str(DEMO / "draft"), "num_speculative_tokens": 3},
    "EAGLE3, K=3": {"method": "eagle3", "model": str(DEMO / "eagle3"), "num_speculative_tokens": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", default="eager", help="of the demo's checkpoints; auto: compiled (default eager)")
    parser.add_argument("--out", type=Path, help="folder for the JSON files")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)

    print("| mode | batch | tokens/s | plain, same run | speed-up | acceptance length | tokens/step | equals plain |")
    print("|---|---|---|---|---|---|---|---|")
    for name, spec in MODES.items():
        for batch in args.batches:
            file = out / f"{spec['method']}-b{batch}.json"
            command = [sys.executable, "-m", "trtspec", "bench", "decode", "--model", str(DEMO / "target")]
            command += ["--spec", json.dumps(spec), "--batch", str(batch), "--output-len", str(args.output_len)]
            command += ["--repeats", str(args.repeats), "--json", str(file), "--backend", args.backend]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            row = json.loads(file.read_text(encoding="utf-8"))
            print(
                f"| {name} | {batch} | {row['tok_s']:.1f} | {row['plain_tok_s']:.1f} | {row['speedup']:.2f}x | "
                f"{figure(row['acceptance_length'])} | {figure(row['tokens_per_step'])} | "
                f"{'yes' if row['lossless'] else 'NO'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
