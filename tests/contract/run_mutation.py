"""Mutation scores of the code where a wrong line is hardest to see (make mutation).

mutmut changes one expression at a time and runs the tests that reach it. A mutant that no test notices survives. The
score of a file is its share of mutants that are killed. mutmut and the packages that it imports come from the package
registry, into their own venv under build/; torch and the tools come from the Python that runs this script.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from environments import ROOT, Unavailable, make, skipped

FOLDER = ROOT / "build" / "mutation"
PACKAGES = [
    "mutmut==3.8.1", "libcst==1.9.0", "setproctitle", "coverage", "click", "textual", "rich", "pygments",
    "markdown-it-py", "mdurl", "mdit-py-plugins", "linkify-it-py", "uc-micro-py", "platformdirs",
]  # fmt: skip
MUTATED = [
    "trtspec/kv/*", "trtspec/verify/*", "trtspec/engine/scheduler.py", "trtspec/methods/chain.py",
    "trtspec/methods/table.py", "trtspec/modes.py",
]  # fmt: skip
TESTS = [
    "tests/unit/test_blocks.py", "tests/unit/test_kv_groups.py", "tests/unit/test_kv_memory.py",
    "tests/unit/test_reuse.py", "tests/unit/test_reuse_world.py", "tests/unit/test_scheduler.py",
    "tests/unit/test_grammar.py", "tests/unit/test_chain_graph.py", "tests/unit/test_modes.py",
    "tests/unit/test_batch.py", "tests/unit/test_workers.py", "tests/unit/test_worker_drafts.py",
    "tests/unit/test_draft_model_worker.py", "tests/unit/test_spec_plan.py", "tests/unit/test_spec_plan_method.py",
    "tests/unit/test_spec_plan_refusals.py", "tests/unit/test_config_speculative.py", "tests/e2e/test_prefix_reuse.py",
    "tests/e2e/test_guided.py",
]  # fmt: skip
GROUPS = {"rest": (MUTATED, TESTS), "chain": (["trtspec/methods/mtp/chain_worker.py"], ["tests/e2e/test_mtp.py"])}
"""Mutated files and their tests: the tests of MTP take longer than all others, and only they run the chain's worker."""
OUTCOMES = {1: "killed", 3: "killed", 0: "survived", 5: "no tests", 33: "no tests", 34: "skipped", None: "not run"}


def main(arguments: list[str]) -> int:
    try:
        python = make(FOLDER / "venv", PACKAGES, lambda python, packages: None)
    except Unavailable as error:
        return skipped("mutants", error)
    environment = {**os.environ, "TRTSPEC_PLUGINS": "0", "PYTHONPATH": ""}
    command = [str(python), "-m", "mutmut", "run", "--max-children", str(os.cpu_count() or 1), *arguments]
    total: Counter[str] = Counter()
    for name, (mutated, tests) in GROUPS.items():
        tree = FOLDER / name
        _copy(tree, mutated, tests)
        subprocess.run(command, cwd=tree, env=environment, check=True)
        for file, found in _results(tree / "mutants"):
            total.update(found)
            _say(file, found)
    _say("all", total)
    return 0


def _copy(tree: Path, mutated: list[str], tests: list[str]) -> None:
    """Copy what git tracks to `tree`, with the settings of mutmut. Results of an earlier run are removed."""
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    lists = {
        "only_mutate": mutated,
        "also_copy": ["README.md", "docs", "tests", "build_scripts", "examples", "benchmarks", "plugins"],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ["-p", "no:xdist", "-m", "not slow and not long"],
    }
    settings = "".join(f"{name}=\n" + "".join(f"    {value}\n" for value in values) for name, values in lists.items())
    settings = f"[mutmut]\nsource_paths=trtspec/\ntimeout_multiplier=3\n{settings}"
    (tree / "setup.cfg").write_text(settings, encoding="utf-8")


def _results(mutants: Path) -> Iterator[tuple[str, Counter[str]]]:
    for file in sorted(mutants.rglob("*.py.meta")):
        codes = json.loads(file.read_text(encoding="utf-8"))["exit_code_by_key"].values()
        if codes:
            name = str(file.relative_to(mutants)).removesuffix(".meta")
            yield name, Counter(OUTCOMES.get(code, "timeout or crash") for code in codes)


def _say(name: str, found: Counter[str]) -> None:
    killed = found["killed"] + found["timeout or crash"]
    print(f"{name:42} {killed:5} of {found.total():5} killed ({killed / found.total():.1%}); {dict(found)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
