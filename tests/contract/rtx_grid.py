"""The grid of `make contract-tensorrt-rtx`: every mode, K, dtype and quantisation in the TensorRT-RTX builder.

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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.contract.modes import MOST_K, RECIPES, Models
from tests.contract.rtx_cells import DTYPES, QUANTISATIONS, SMS, Cell, check
from trtspec.modes import SpeculativeDecodingMode as M
from trtspec.train.checkpoint import write_atomically

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("tensorrt_rtx.md")
SHORT = {
    (M.NONE, 0, "bfloat16", None, "plugin"): "builds",
    (M.NONE, 0, "bfloat16", None, "native"): "builds",
    (M.EAGLE3_ONE_MODEL, 3, "bfloat16", None, "plugin"): "builds",
    (M.EAGLE3_ONE_MODEL, 1, "float16", None, "native"): "builds",
    (M.DFLASH, 3, "bfloat16", None, "plugin"): "refused",
}
"""Cells of the short form, and how their verdicts begin."""


def grid() -> list[tuple[M, int, str, str | None, str]]:
    """All cells: mode, K, dtype, quantisation, attention.

    Modes whose drafts come from the host have the graphs of NONE, with K drafts to verify.
    """
    drafting = [mode for mode, recipe in RECIPES.items() if not recipe.from_host]
    pairs = [(M.NONE, 0), *itertools.product((M.NGRAM, *drafting), range(1, MOST_K + 1))]
    ways = [*itertools.product(DTYPES, QUANTISATIONS, ("plugin",)), *itertools.product(DTYPES, (None,), ("native",))]
    return [(*pair, *way) for pair in pairs for way in ways]


def main() -> int:
    """Run the cells -> exit status. It is 1 if a cell of the short form is not as SHORT says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every N-th cell, beginning with the I-th")
    parser.add_argument("--short", action="store_true", help="a few cells; the table stays as it is")
    parser.add_argument("--modes", nargs="+", help="these modes only")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "contract-rtx-cells")
    asked = parser.parse_args()
    index, number = (int(part) for part in asked.shard.split("/"))
    wanted = list(SHORT) if asked.short else grid()[index - 1 :: number]
    results = asked.results / _sources()
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(Path(scratch))
        for mode, K, *way in wanted:
            file = results / f"{mode.name}-{K}-{'-'.join(map(str, way))}.json"
            if file.exists() or (asked.modes and mode.name not in asked.modes):
                continue
            cell = check(models, mode, K, *way)
            write_atomically(file, json.dumps(asdict(cell)).encode())
            print(f"{mode.name:24} K={K} {' '.join(map(str, way)):26} {cell.verdict}", flush=True)
    cells = [Cell(**json.loads(file.read_text())) for file in sorted(results.glob("*.json"))]
    if asked.short:
        found = {(M[one.mode], one.K, one.dtype, one.quantization, one.attention): one.verdict for one in cells}
        return int(not all(found[cell].startswith(words) for cell, words in SHORT.items()))
    TABLE.write_text(table(cells))
    print(f"{len(cells)} of {len(grid())} cells are done: {TABLE.relative_to(ROOT)}")
    return 0


def _sources() -> str:
    """Digest of all files that a result depends on."""
    package = [file for file in (ROOT / "trtspec").rglob("*.py") if file.relative_to(ROOT).parts[1] not in ("cli",)]
    tests = [*(ROOT / "tests").glob("*_checkpoints.py"), ROOT / "tests" / "checkpoints.py"]
    cells = [Path(__file__).with_name(name) for name in ("modes.py", "rtx_builder.py", "rtx_cells.py")]
    digest = hashlib.sha256()
    for file in sorted((*package, *tests, *cells)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def table(cells: Sequence[Cell]) -> str:
    """Return Markdown: a row for each mode and quantisation, a column for each dtype, the Ks that build in it."""
    lines = [
        "# Every mode in NVIDIA's TensorRT-RTX builder",
        "",
        "Written by `make contract-tensorrt-rtx`. Networks of random models of 3 layers, with our plugins cut out.",
        "Those of native rows are whole networks of TensorRT's own layers, as backend `tensorrt_rtx` builds them.",
        f"Each was built for SM {' and '.join(map(str, SMS))}, without a GPU: no plan has run. A cell has each K that",
        f"builds, or the number of a reason below. {len(cells)} of {len(grid())} cells were tried.",
        "",
        f"| mode | weights | {' | '.join(DTYPES)} |",
        f"|---|---|{'---|' * len(DTYPES)}",
    ]
    reasons: dict[str, int] = {}
    by_row: dict[tuple[str, str], dict[str, list[Cell]]] = {}
    for cell in cells:
        weights = "native" if cell.attention == "native" else cell.quantization or "plain"
        row = by_row.setdefault((cell.mode, weights), {})
        row.setdefault(cell.dtype, []).append(cell)
    for (mode, weights), row in sorted(by_row.items()):
        words = []
        for dtype in DTYPES:
            found = sorted(row.get(dtype, []), key=lambda cell: cell.K)
            numbers = {cell.K: _reason(reasons, cell.verdict) for cell in found}
            built = [str(K) for K, number in numbers.items() if number is None]
            refused = [f"{K}: ({number})" for K, number in numbers.items() if number is not None]
            same = set(numbers.values())
            words.append(f"({same.pop()})" if len(same) == 1 and not built and found else ", ".join(built + refused))
        lines.append(f"| `{mode}` | {weights} | {' | '.join(words)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


def _reason(reasons: dict[str, int], verdict: str) -> int | None:
    return None if verdict == "builds" else reasons.setdefault(verdict, len(reasons) + 1)


if __name__ == "__main__":
    sys.exit(main())
