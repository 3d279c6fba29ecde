"""llama.cpp's server, with EAGLE3 or without, as a child process that is called over HTTP. Standard library only.

The fields of "load" are server (the program), file (of the target), draft (of the head, or null), num_drafts, p_min,
max_batch, max_len, and prefix_caching (default: false). "generate" sends one request for each prompt. The server's own
samplers are off, except for the temperature.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.peers.worker import Timed, serve


class LlamaServer:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        threads, slots = os.environ["OMP_NUM_THREADS"], request["max_batch"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.prefix_caching = request.get("prefix_caching", False)
        command = [request["server"], "-m", request["file"], "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", threads, "-tb", threads, "-np", str(slots), "-c", str(request["max_len"] * slots), "-kvu"]
        if request["draft"] is not None:
            command += ["-md", request["draft"], "--spec-type", "draft-eagle3", "-td", threads]
            command += ["--spec-draft-n-max", str(request["num_drafts"]), "--spec-draft-p-min", str(request["p_min"])]
        start = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=2, stderr=2)
        self._wait()
        self.generate({"prompts": [request["first_prompt"]], "output_len": 1, "ends": True})
        version = subprocess.run([request["server"], "--version"], capture_output=True, text=True, check=True)
        found = re.search(r"version: (.*)", version.stdout + version.stderr)
        return {"startup_s": time.perf_counter() - start, "version": found[1] if found else "unknown"}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        prompts, timed = request["prompts"], Timed()
        with ThreadPoolExecutor(request.get("at_once") or len(prompts)) as pool:
            start = time.perf_counter()
            replies = list(pool.map(lambda prompt: self._complete(prompt, request), prompts))
            timed.seconds = time.perf_counter() - start
        timed.outputs = [reply["tokens"] for reply in replies]
        timed.first_tokens = len(prompts)
        accepted = sum(reply["timings"].get("draft_n_accepted", 0) for reply in replies)
        timed.request_steps = sum(map(len, timed.outputs)) - accepted - len(prompts)
        return timed.to_dict()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _complete(self, prompt: list[int], request: dict[str, Any]) -> dict[str, Any]:
        temperature = request.get("temperature", 0.0)
        fields = {
            "prompt": prompt, "n_predict": request["output_len"], "ignore_eos": not request.get("ends"),
            "temperature": temperature, "samplers": ["temperature"] if temperature else ["top_k"],
            "top_k": 0 if temperature else 1, "cache_prompt": self.prefix_caching, "return_tokens": True,
        }  # fmt: skip
        reply: dict[str, Any] = self._ask("/completion", fields)
        return reply

    def _wait(self) -> None:
        """Wait until the model is loaded."""
        end = time.monotonic() + 300
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self.process.returncode}")
            try:
                self._ask("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
            else:
                return
        raise RuntimeError("llama-server is not ready after 300 s")

    def _ask(self, path: str, fields: dict[str, Any] | None = None) -> Any:
        data = None if fields is None else json.dumps(fields).encode()
        headers = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=600) as reply:
            return json.load(reply)


if __name__ == "__main__":
    peer = LlamaServer()
    serve({"load": peer.load, "generate": peer.generate})
    peer.close()
