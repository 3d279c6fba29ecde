"""How long a checkpoint takes to start: the first time, with a compilation; again, from the cache; and op by op.

    python benchmarks/start.py MODEL
    python benchmarks/start.py MODEL --spec '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}'

Every start is a process of its own, which asks for one token. The cache is a folder of this run, empty at first. Files
are in the system's page cache from the second start on. Seconds count from `LLM(...)` to the first token, with imports
done, and from the process's first line. Figures are medians, with the longest time in brackets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CHILD = """
import time
begin = time.perf_counter()
import json, sys
from trtspec import LLM, SamplingParams
imported = time.perf_counter()
model, speculation, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
llm = LLM(model, speculation, **options)
params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
next(iter(llm.stream([1, 2, 3, 4], params)))
end = time.perf_counter()
print(json.dumps([end - imported, end - begin, "torch._inductor" in sys.modules]))
"""


def start(model: str, speculation: str, backend: str, cache: str) -> tuple[float, float, bool]:
    """Seconds to the first token without and with imports, and whether the compiler was imported."""
    options = json.dumps({"backend": backend})
    done = subprocess.run(
        [sys.executable, "-c", CHILD, model, speculation, options],
        env={**os.environ, "TRTSPEC_CACHE": cache},
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the start failed:\n{done.stderr[-3000:]}")
    after, whole, compiler = json.loads(done.stdout.splitlines()[-1])
    return after, whole, compiler


def row(name: str, starts: Sequence[tuple[float, float, bool]]) -> str:
    """A row of a Markdown table."""
    cells = []
    for values in list(zip(*starts, strict=True))[:2]:
        most = f" ({max(values):.2f})" if len(values) > 1 else ""
        cells.append(f"{statistics.median(values):.2f}{most}")
    imported = "yes" if any(compiler for _, _, compiler in starts) else "no"
    return f"| {name} | {len(starts)} | {' | '.join(cells)} | {imported} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--spec", default="null", help="speculative_config as JSON")
    parser.add_argument("--repeats", type=int, default=5, help="of all starts but the first")
    args = parser.parse_args()
    model = str(Path(args.model).resolve())
    print("| start | processes | LLM(...) to first token, s | with imports, s | imports torch._inductor |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        cache = f"{folder}/cache"
        print(row("first: compiled", [start(model, args.spec, "aoti", cache)]), flush=True)
        for name, backend in (("again: out of the cache", "aoti"), ("op by op", "eager")):
            print(row(name, [start(model, args.spec, backend, cache) for _ in range(args.repeats)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
