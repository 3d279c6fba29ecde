"""`make contract-trees`: 200 requests with draft trees in every mode that drafts them, and a table of the results.

Trees have one shape, or one that each step chooses. On eager and on a GPU, each mode and shape runs in fp32 and bf16,
at batch 1 and 8. Engines of aoti and onnx take long to build. So there each mode and shape runs in one combination, and
every pair of batch and dtype occurs with both shapes; onnx has fp32 alone. Finished cells are kept, as in run_modes.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from tests.contract.run_modes import ROOT, sources
from tests.contract.trees import BATCHES, BUILT, DTYPES, DYNAMIC, MODES, TreeCell, Trees
from trtspec.train.checkpoint import write_atomically

TABLE = Path(__file__).with_name("trees.md")
BACKENDS = ("eager", "aoti", "onnx", *(("cuda",) if torch.cuda.is_available() else ()))
REQUESTS = 200


def pairs_of(backend: str, number: int) -> list[tuple[str, int]]:
    """(dtype, batch) of the cells of a mode, the `number`-th of its shape, on a backend."""
    pairs = list(itertools.product(DTYPES[:1] if backend == "onnx" else DTYPES, BATCHES))
    return [pairs[number % len(pairs)]] if backend in BUILT else pairs


def main() -> int:
    """Run the cells -> exit status, 0 if all of them hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "contract-trees")
    asked = parser.parse_args()
    results = asked.results / sources("contract/modes.py", "contract/trees.py")
    results.mkdir(parents=True, exist_ok=True)
    wanted = [
        (backend, shape, mode, *pair)
        for backend in asked.backends
        for shape, modes in (("static", MODES), ("dynamic", DYNAMIC))
        for i, mode in enumerate(modes)
        for pair in pairs_of(backend, i)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        trees = Trees(Path(scratch), REQUESTS)
        for backend, shape, mode, dtype, batch in wanted:
            file = results / f"{backend}-{shape}-{mode.name}-{dtype}-{batch}.json"
            if file.exists():
                continue
            try:
                cell = trees.check(mode, shape, backend, dtype, batch)
            except Exception as error:
                cell = TreeCell(mode.name, shape, backend, dtype, batch, f"{type(error).__name__}: {error}")
            write_atomically(file, json.dumps(asdict(cell)).encode())
            print(
                f"{backend:6} {shape:7} {mode.name:24} {dtype} {batch}  {cell.verdict}  {list(cell.acceptance)}",
                flush=True,
            )
    cells = [TreeCell(**json.loads(file.read_text())) for file in sorted(results.glob("*.json"))]
    TABLE.write_text(table(cells))
    bad = [cell for cell in cells if cell.verdict != "holds"]
    print(f"{len(cells)} cells are done, {len(bad)} broken: {TABLE.relative_to(ROOT)}")
    return 1 if bad else 0


def table(cells: list[TreeCell]) -> str:
    """Return Markdown: a row for each cell."""
    lines = [
        "# Draft trees against the laws",
        "",
        "Written by `make contract-trees`. Trees of 10 nodes and depth 3: static ones, and dynamic ones, which each",
        "step shapes for each request. Of each cell the share of drafts that are accepted at each depth, wherever the",
        f"tokens of {REQUESTS} requests (greedy and seeded, packed, preempted at batch 8, cut by stops) are those of",
        "plain decoding; else what is not.",
        "",
        "| mode | shape | backend | dtype | batch | accepted by depth |",
        "|---|---|---|---|---|---|",
    ]
    for cell in sorted(cells, key=lambda cell: (cell.mode, cell.shape, cell.backend, cell.dtype, cell.batch)):
        shares = ", ".join(f"{share:.2f}" for share in cell.acceptance)
        said = shares if cell.verdict == "holds" else f"**{cell.verdict}**"
        lines.append(f"| `{cell.mode}` | {cell.shape} | {cell.backend} | {cell.dtype} | {cell.batch} | {said} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
