"""trtspec itself, a contestant like the others: from an engine folder, or eager from the checkpoint."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

import trtspec
from benchmarks.peers.worker import Queue, Stopwatch, serve
from trtspec import LLM, SamplingParams
from trtspec.build.build import build_engine
from trtspec.build.sources import DIGITS, engine_digest
from trtspec.config.engine import EngineConfig
from trtspec.interop.reading import read_speculative_config


class Trtspec:
    def build(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the engine folder for a load request; build it unless one made from the same inputs is there."""
        engines, label, config = Path(request["engines"]), request["label"], _engine_config(request)
        digest = engine_digest(Path(request["model"]), request["speculation"], dataclasses.asdict(config))
        folder = engines / f"{label}-{digest}"
        if not folder.is_dir():
            for older in engines.glob(f"{label}-" + "?" * DIGITS):
                shutil.rmtree(older)
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            build_engine(request["model"], folder, read_speculative_config(request["speculation"]), config)
        return {"engine": str(folder)}

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load the folder request["engine"] with the lookup drafts of request["lookup"]; without that folder, eager."""
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        start = time.perf_counter()
        if "engine" in request:
            self.llm = LLM(
                request["engine"],
                request.get("lookup"),
                enable_prefix_caching=request.get("prefix_caching", False),
                generation_config="off",
            )
        else:
            config = {**dataclasses.asdict(_engine_config(request)), "backend": "eager"}
            self.llm = LLM(request["model"], request["speculation"], **config)
        self.generate({"prompts": [request["first_prompt"]], "output_len": 1})
        reply = {"startup_s": time.perf_counter() - start, "version": trtspec.__version__}
        if request["speculation"] is None:
            reply["weight_bytes"] = self.llm.engine.executables[0].weight_bytes
        return reply

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        engine, ends, prompts = self.llm.engine, request.get("ends", False), request["prompts"]
        params = SamplingParams(
            temperature=request.get("temperature", 0.0),
            max_tokens=request["output_len"],
            ignore_eos=not ends,
            detokenize=False,
        )
        stopwatch, queue = Stopwatch(len(prompts)), Queue(len(prompts), request.get("at_once"))
        samples, rows = [], {}
        while queue.has_work:
            for b in queue.start():
                # seeds, as texts would else depend on earlier requests
                samples.append(engine.add_request(prompts[b], dataclasses.replace(params, seed=b))[0])
                rows[samples[-1].request_id] = b
            for emission in engine.step():
                stopwatch.give(rows[emission.request.request_id], list(emission.tokens))
                queue.running -= emission.finished
        for sample in samples:
            if sample.error is not None:
                raise sample.error
        return stopwatch.stop()


def _engine_config(request: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        max_batch_size=request["max_batch"],
        max_num_tokens=request["max_num_tokens"],
        max_seq_len=request["max_len"],
        enable_prefix_caching=False,
        generation_config="off",
        quantization=None if request["format"] == "bf16" else request["format"],
    )


if __name__ == "__main__":
    peer = Trtspec()
    serve({"build": peer.build, "load": peer.load, "generate": peer.generate})
