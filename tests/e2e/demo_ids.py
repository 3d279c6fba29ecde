"""Ids that the demo generates, and the drafts each step kept, on each instruction set of the CPU kernels.

python -m tests.e2e.demo_ids record             # writes demo_ids.json for all instruction sets of this machine
python -m tests.e2e.demo_ids run BACKEND MODE   # prints the ids of one mode as JSON, under $TRTSPEC_CPU_ISA
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
TEMPERATURES = (0.0, 0.8)
MAX_TOKENS = 48


def run(backend: str, modes: list[str]) -> dict[str, Any]:
    """mode -> temperature -> {"ids": those of each prompt, "outcomes": [drafts, kept, steps] over all prompts}."""
    from rich.console import Console

    from examples.demo.__main__ import MODES, PROMPTS
    from examples.demo.engines import ENGINES, build_missing, target_of
    from trtspec import LLM, SamplingParams, SpeculationStats

    found: dict[str, Any] = {}
    for mode in modes:
        _, engine, *own = MODES[mode]
        speculation = own[0] if own else None
        if backend == "aoti":
            folder = build_missing([engine], Console(stderr=True))[engine]
            llm = LLM(folder, speculation, max_batch_size=1)
        else:
            llm = LLM(target_of(engine), speculation or ENGINES[engine], backend="eager", max_batch_size=1)
        found[mode] = {}
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True)
            outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
            stats = SpeculationStats.total(output.speculation for output in outputs)
            found[mode][str(temperature)] = {
                "ids": [list(output.outputs[0].token_ids) for output in outputs],
                "outcomes": sorted([*outcome, steps] for outcome, steps in stats.outcomes.items()),
            }
        llm.shutdown()
    return found


def run_under(isa: str, backend: str, modes: list[str]) -> dict[str, Any]:
    """Call `run` in a process of its own, with the kernels of `isa`. RuntimeError with its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.demo_ids", "run", backend, *modes],
        cwd=FILE.parents[2],
        env={**os.environ, "TRTSPEC_CPU_ISA": isa, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    if sys.argv[1] == "run":
        print(json.dumps(run(sys.argv[2], sys.argv[3:])))
        return
    from examples.demo.__main__ import MODES

    recorded: dict[str, Any] = {}
    for backend in ("eager", "aoti"):
        for isa in ISAS:
            print(backend, isa, flush=True)
            recorded.setdefault(backend, {})[isa] = run_under(isa, backend, list(MODES))
            FILE.write_text(json.dumps(recorded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
