"""Our server next to vLLM's: the same model, draft head, requests and arrivals; each server alone on the machine.

    python benchmarks/serving.py --vllm-python PATH/TO/VLLM/VENV/bin/python

For each rate both servers get the same requests (Poisson arrivals, seeded). Goodput at an objective TTFT:TPOT is the
number of requests a second that meet it. Their first token comes within TTFT ms, and further tokens take at most TPOT
ms each. The best goodput of a server is that at its best rate.

vLLM runs in an environment of its own, made by the commands in benchmarks/heads_vs_vllm.py. It uses Intel's OpenMP if
the environment has it, and neither CUDA nor compile flags of ours. Our server runs an engine folder, which is built
first, once (build/serving-engine-K).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers.environments import vllm_variables  # noqa: E402
from trtspec.bench.serving import Objective, Told, arrivals, goodput, run_clients, summary  # noqa: E402
from trtspec.cli.bench_serve import make_prompts, served_model  # noqa: E402

DEMO = ROOT / "examples" / "demo"
MAX_LEN, MAX_BATCH = 1024, 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="python of the environment that has vLLM; without it ours runs alone")
    rates = [8, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52]
    parser.add_argument("--rates", type=float, nargs="+", default=rates, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20, help="of arrivals, at each rate")
    parser.add_argument("--input-chars", type=int, default=400)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--slo", nargs="+", default=["100:5", "100:10", "250:20"], metavar="TTFT:TPOT", help="ms")
    parser.add_argument("--k", type=int, default=3, help="draft tokens of the demo's EAGLE3 head; 0 = plain decoding")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    objectives = {slo: Objective(*(float(ms) / 1000 for ms in slo.split(":"))) for slo in asked.slo}
    results: dict[str, Any] = {"asked": {k: v for k, v in vars(asked).items() if k not in ("json", "vllm_python")}}

    def keep() -> None:
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        for name, server in (("trtspec", ours), ("vLLM", theirs)):
            if name == "trtspec" or asked.vllm_python:
                command, ready, variables = server(asked)
                with running(command, ready, variables, log) as (url, seconds):
                    print(f"{name}: ready {seconds:.1f} s after its start", flush=True)
                    results[name] = {}
                    for rate, result in measure(url, asked, objectives):
                        results[name][rate] = result
                        keep()
    show(results, asked.slo)
    return 0


def ours(asked: argparse.Namespace) -> tuple[Sequence[str], str, dict[str, str]]:
    """Command, URL that answers when the server is ready, and environment variables of our server."""
    K = asked.k
    engine = ROOT / "build" / f"serving-engine-{K}"
    if not engine.exists():
        mode = [] if K == 0 else [
            "--speculative_decoding_mode", "EAGLE3_ONE_MODEL", "--speculative_model_dir", str(DEMO / "eagle3"),
            "--max_draft_len", str(K),
        ]  # fmt: skip
        limits = ["--max_batch_size", str(MAX_BATCH), "--max_seq_len", str(MAX_LEN)]
        build = ["build", "--checkpoint_dir", str(DEMO / "target"), "--output_dir", str(engine), *limits, *mode]
        subprocess.run([sys.executable, "-m", "trtspec", *build], check=True)
    command = [sys.executable, "-m", "trtspec", "serve", "--model", str(engine), "--port", "8377"]
    return command, "http://127.0.0.1:8377/ready", {}


def theirs(asked: argparse.Namespace) -> tuple[Sequence[str], str, dict[str, str]]:
    """Command, URL that answers when the server is ready, and environment variables of vLLM's server."""
    python, K = asked.vllm_python, asked.k
    speculation = {"method": "eagle3", "model": str(DEMO / "eagle3"), "num_speculative_tokens": K}
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO / "target"), "--port", "8378",
        "--host", "127.0.0.1", "--max-model-len", str(MAX_LEN), "--max-num-seqs", str(MAX_BATCH),
        "--generation-config", "vllm", *(["--speculative-config", json.dumps(speculation)] if K else []),
    ]  # fmt: skip
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    variables = {**vllm_variables(python, cpus, in_process=False), "HF_HUB_OFFLINE": "1"}
    return command, "http://127.0.0.1:8378/health", variables


@contextlib.contextmanager
def running(command: Sequence[str], ready: str, variables: dict[str, str], log: Path) -> Iterator[tuple[str, float]]:
    """A server that runs until the block is left: its address, and the seconds until it was ready."""
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        for _ in range(6000):
            with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=2) as answer:
                if answer.status == 200:
                    break
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield ready.rpartition("/")[0], time.monotonic() - start
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def measure(
    url: str, asked: argparse.Namespace, objectives: dict[str, Objective]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Results of each rate, after a round that warms up."""
    model, fields = served_model(url, None), {"temperature": 0, "ignore_eos": True}

    def once(rate: float, seconds: float, seed: int) -> list[Told]:
        prompts = make_prompts(None, max(int(rate * seconds), 8), asked.input_chars, seed)
        return asyncio.run(run_clients(url, model, arrivals(prompts, asked.output_len, rate, seed=1), fields))

    once(asked.rates[0], 5, seed=0)
    for rate in asked.rates:
        told = once(rate, asked.seconds, seed=int(rate * 10))
        good = {slo: goodput(told, objective) for slo, objective in objectives.items()}
        yield f"{rate:g}", summary(told) | {"goodput_s": good}


def show(results: dict[str, Any], slos: Sequence[str]) -> None:
    """Print a row for each rate; if both servers were measured, also the ratio of ours to vLLM's."""
    times = ("ttft_ms p50", "ttft_ms p99", "tpot_ms p50", "tpot_ms p99")
    rows = (*times, "tokens_s", *(f"goodput_s {slo}" for slo in slos))
    names = [name for name in ("trtspec", "vLLM") if name in results]
    print(f"{'rate':>6}  {'':8}" + "".join(f"{row:>17}" for row in rows))
    for rate in results["trtspec"]:
        values = {name: [_value(results[name][rate], row) for row in rows] for name in names}
        for name in names:
            print(f"{rate:>6}  {name:8}" + "".join(f"{value:17.2f}" for value in values[name]))
        if len(names) == 2:
            pairs = zip(rows, values["trtspec"], values["vLLM"], strict=True)
            ratios = [
                (theirs / ours if "ms" in row else ours / theirs) if ours and theirs else float("nan")
                for row, ours, theirs in pairs
            ]
            print(f"{'':6}  {'ratio':8}" + "".join(f"{ratio:16.2f}x" for ratio in ratios))
    for slo in slos:
        best = {name: max(one["goodput_s"][slo] for one in results[name].values()) for name in names}
        words = ", ".join(f"{name} {value:.2f} requests/s" for name, value in best.items())
        ratio = f", ratio {best['trtspec'] / best['vLLM']:.2f}x" if best.get("vLLM") else ""
        print(f"best goodput at {slo} ms: {words}{ratio}")


def _value(result: dict[str, Any], row: str) -> float:
    name, _, part = row.partition(" ")
    return float(result[name][part] if part else result[name])


if __name__ == "__main__":
    sys.exit(main())
