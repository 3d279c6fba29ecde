"""Processes and environments of benchmarks/peers.py: workers that fail, crash or hang, and errors as sentences."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import environments, runner
from benchmarks.peers.checkpoints import Model, open_model
from benchmarks.peers.contests import Contest, Contestant, Group
from benchmarks.peers.main import main
from benchmarks.peers.process import PeerError, Worker
from benchmarks.peers.results import Start
from benchmarks.peers.runner import Runner
from tests.unit.peer_runs import OURS, ROOT, THEIRS

pytestmark = pytest.mark.slow

FAKE_PEER = """
import os, subprocess, sys, time
from benchmarks.peers.worker import Stopwatch, serve

def generate(request):
    print("noise on stdout")
    watch = Stopwatch(2)
    for tokens in ([1], [2, 3], []):
        watch.give(0, tokens)
    watch.give(1, [4])
    return watch.stop()

def fail(request):
    raise ValueError("no such thing\\nmore")

def crash(request):
    os._exit(3)

def child(request):
    return {"pid": subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid}

serve({"generate": generate, "fail": fail, "crash": crash, "child": child, "sleep": lambda r: time.sleep(600)})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    (tmp_path / "fake_peer.py").write_text(FAKE_PEER)
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    worker = Worker("fake", sys.executable, "fake_peer", {"PYTHONPATH": path}, tmp_path / "log")
    yield worker
    worker.kill()


def test_worker_answers_and_goes_on_after_an_error(worker: Worker) -> None:
    reply = worker.call("generate", 60)
    assert reply["outputs"] == [[1, 2, 3], [4]]
    assert (reply["first_tokens"], reply["request_steps"]) == (2, 1)
    assert 0 < reply["first_s"] <= reply["seconds"]
    with pytest.raises(PeerError, match=r"fake: fail failed: ValueError: no such thing; see .*log"):
        worker.call("fail", 60)
    assert worker.call("generate", 60)["outputs"]
    assert worker.peak_rss() > 1e6
    worker.pause()
    assert "State:\tT" in worker._members()[0]
    assert worker.call("generate", 60)["outputs"]
    worker.pause()
    worker.close()
    assert "noise on stdout" in worker.log.read_text()


def test_worker_that_crashes_or_hangs(worker: Worker) -> None:
    with pytest.raises(PeerError, match=r"fake: sleep took more than 0 s; see .*log"):
        worker.call("sleep", 0.1)
    worker.kill()
    with pytest.raises(PeerError, match=r"fake: ended during crash with code -15; see .*log"):
        worker.call("crash", 60)


def test_no_process_of_a_worker_stays(worker: Worker) -> None:
    pid = worker.call("child", 60)["pid"]
    worker.kill()
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_a_failing_peer_is_left_out_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, name: str) -> None:
            self.name, self.calls = name, 0

        def call(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
            self.calls += 1
            if self.name.startswith("llama") and self.calls == 2:
                raise PeerError("llama.cpp: ended")
            return {"seconds": 2.0, "first_s": 1.0, "first_tokens": 1, "request_steps": 1, "outputs": fields["prompts"]}

        def pause(self) -> None:
            pass

        def peak_rss(self) -> int:
            return 7

        def close(self) -> None:
            ended.append(self.name)

        kill = close

    class FakeRunner(Runner):
        def _start(self, model: Model, group: Group, contestant: Contestant) -> Any:
            if contestant.peer == "vllm":
                raise PeerError("vLLM: ended during load")
            self.starts.append(Start(model.name, group.name, contestant, 1.0, 1))
            return Fake(contestant.name)

    class FakeProbe:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self) -> float:
            self.count += 1
            return float(self.count)

    ended: list[str] = []
    monkeypatch.setattr(runner, "Probe", FakeProbe)
    contestants = (OURS, Contestant("vllm"), THEIRS)
    pythons = dict.fromkeys(("trtspec", "vllm", "llama"), sys.executable)
    test = FakeRunner(tmp_path, pythons, torch.get_num_threads(), 3, lambda what: None)
    test.run(open_model("demo", tmp_path), Group("decoding", (Contest("plain", 1, 8, 4),), contestants))
    assert [(done.contestant.name, done.repeat) for done in test.runs] == [
        ("trtspec", 1),
        ("trtspec", 2),
        ("trtspec", 3),
    ]
    # Repeats 0 and 1 make three probes each. In repeat 1 llama.cpp comes first and fails, and trtspec has a probe just
    # before it.
    assert [done.probes for done in test.runs] == [(5.0, 6.0), (7.0, 8.0), (9.0, 10.0)]
    assert test.failures == ["demo, decoding: vLLM: ended during load", "demo, plain: llama.cpp: ended"]
    assert {"trtspec", "llama.cpp BF16"} <= set(ended)
    assert [start.peak_rss for start in test.starts] == [7, 0]


def test_environment_errors_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match="--vllm-python nowhere/python is no program"):
        environments.given_python("vllm", "nowhere/python")
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PeerError, match="needs a C\\+\\+ compiler"):
        environments.python_of("llama", tmp_path / "llama", tmp_path / "log", 1, lambda what: None)


def test_vllm_gets_the_openmp_that_it_advises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "other.so")
    python, lib = str(tmp_path / "bin" / "python"), tmp_path / "lib"
    gnu = lib / "python3.11" / "site-packages" / "torch" / "lib" / "libgomp-1.so.1"
    gnu.parent.mkdir(parents=True)
    gnu.write_text("")
    apart = environments.vllm_variables(python, [0, 2], in_process=False)
    assert apart["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert apart["VLLM_CPU_OMP_THREADS_BIND"] == "0,2"
    assert "LD_PRELOAD" not in apart
    inside = environments.vllm_variables(python, [0, 2], in_process=True)
    assert inside["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert (inside["LD_PRELOAD"], inside["GOMP_CPU_AFFINITY"]) == (f"{gnu}:other.so", "0 2")
    intel = lib / "libiomp5.so"
    intel.write_text("")
    assert environments.openmp(python) == (intel, gnu)
    for in_process in (False, True):
        variables = environments.vllm_variables(python, [0, 2], in_process)
        assert variables["LD_PRELOAD"] == f"{intel}:other.so"
        assert ("KMP_AFFINITY" in variables) == in_process


def test_environment_is_reused(tmp_path: Path) -> None:
    (tmp_path / "made.txt").write_text(repr(environments.RECIPES["vllm"]))
    python = environments.python_of("vllm", tmp_path, tmp_path / "log", 1, lambda what: None)
    assert python == str(tmp_path / "bin" / "python")


@pytest.mark.parametrize("arguments", [["--only", "tgi"], ["--what", ""], ["--repeats", "0"], ["--output-len", "1"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("x", arguments)
    assert "error:" in capsys.readouterr().err
