"""`make contract`: run every mode with every K on every backend that is available, and write the table of results.

Finished cells are kept. After an interruption, run it again to go on. For several machines, give each a shard (`--shard
1/4`), and run it once more where all results are. If a file that results depend on changes, all cells run again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from tests.contract.modes import MOST_K, RECIPES, Cell, Models, check
from trtspec.modes import SpeculativeDecodingMode as M
from trtspec.train.checkpoint import write_atomically

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("modes.md")
BACKENDS = ("eager", "aoti", "onnx", *(("cuda",) if torch.cuda.is_available() else ()))
ALL = len(BACKENDS) * len(RECIPES) * MOST_K


def main() -> int:
    """Run the cells -> exit status, 0 if every finished cell holds or is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every N-th cell, beginning with the I-th")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--k", nargs="+", type=int, default=range(1, MOST_K + 1), choices=range(1, MOST_K + 1))
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "contract-modes")
    asked = parser.parse_args()
    index, number = (int(part) for part in asked.shard.split("/"))
    results = asked.results / sources("contract/modes.py")
    results.mkdir(parents=True, exist_ok=True)
    wanted = list(itertools.product(asked.backends, RECIPES, asked.k))
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(Path(scratch))
        for backend, mode, K in wanted[index - 1 :: number]:
            file = results / f"{backend}-{mode.name}-{K}.json"
            if not file.exists():
                cell = _checked(models, mode, K, backend)
                write_atomically(file, json.dumps(asdict(cell)).encode())
                print(f"{backend:6} {mode.name:24} K={K}  {cell.verdict}  {list(cell.acceptance)}", flush=True)
    cells = [Cell(**json.loads(file.read_text())) for file in sorted(results.glob("*.json"))]
    bad = [cell for cell in cells if cell.verdict != "holds" and not cell.verdict.startswith("refused")]
    TABLE.write_text(table(cells))
    print(f"{len(cells)} of {ALL} cells are done, {len(bad)} broken: {TABLE.relative_to(ROOT)}")
    return 1 if bad else 0


def _checked(models: Models, mode: M, K: int, backend: str) -> Cell:
    try:
        return check(models, mode, K, backend)
    except Exception as error:
        return Cell(mode.name, K, backend, f"{type(error).__name__}: {error}")


def sources(*more: str) -> str:
    """Digest of all files that a result depends on. more: those among tests/ that not all results depend on."""
    package = [
        file for file in (ROOT / "trtspec").rglob("*.py") if file.relative_to(ROOT).parts[1] not in ("cli", "train")
    ]
    kernels = [file for file in (ROOT / "plugins").rglob("*") if file.suffix in (".py", ".cpp", ".h")]
    cells = [
        ROOT / "tests" / name
        for name in (
            "checkpoints.py",
            "head_checkpoints.py",
            "dspark_checkpoints.py",
            "e2e/tiny.py",
            *more,
        )
    ]
    digest = hashlib.sha256()
    for file in sorted((*package, *kernels, *cells)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def table(cells: list[Cell]) -> str:
    """Return Markdown: a row for each mode and backend, a column for each K."""
    lines = [
        "# Every mode against the laws",
        "",
        "Written by `make contract`. Of each mode, backend and K the acceptance length, wherever the tokens of 64",
        "requests (greedy and seeded, packed, preempted, cut by stops) are those of plain decoding; else what is not.",
        f"{len(cells)} of {ALL} cells were run{'.' if len(cells) == ALL else '; the others are blank.'}",
        "",
        f"| mode | backend | {' | '.join(f'K = {K}' for K in range(1, MOST_K + 1))} |",
        f"|---|---|{'---|' * MOST_K}",
    ]
    refused: dict[str, None] = {}
    by_row: dict[tuple[str, str], dict[int, Cell]] = {}
    for cell in cells:
        by_row.setdefault((cell.mode, cell.backend), {})[cell.K] = cell
    for (mode, backend), row in sorted(by_row.items()):
        words = []
        for K in range(1, MOST_K + 1):
            cell = row.get(K)
            if cell is None:
                words.append("")
            elif cell.verdict == "holds":
                words.append(f"{cell.acceptance_length:.2f}")
            elif cell.verdict.startswith("refused"):
                words.append("refused")
                refused[f"{mode} on {backend} is {cell.verdict}"] = None
            else:
                words.append(f"**{cell.verdict}**")
        lines.append(f"| `{mode}` | {backend} | {' | '.join(words)} |")
    return "\n".join([*lines, "", *(f"- {line}" for line in refused), ""])


if __name__ == "__main__":
    sys.exit(main())
