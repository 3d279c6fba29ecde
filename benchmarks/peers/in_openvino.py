"""OpenVINO GenAI, with an EAGLE3 head or without. Runs in its own environment.

The fields of "load" are folder (of the target in OpenVINO's format), draft (of the head, or null), num_drafts,
max_batch, max_len, max_num_tokens, and prefix_caching (default: false).
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from benchmarks.peers.worker import Queue, Stopwatch, serve


class OpenVino:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        import openvino
        import openvino_genai

        self.openvino, self.genai, self.names = openvino, openvino_genai, itertools.count()
        self.num_drafts = request["num_drafts"] if request["draft"] is not None else 0
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs = request["max_num_tokens"], request["max_batch"]
        scheduler.dynamic_split_fuse = False
        scheduler.enable_prefix_caching = request.get("prefix_caching", False)
        scheduler.cache_size = 1  # GB
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"])}
        if request["draft"] is not None:
            options["draft_model"] = openvino_genai.draft_model(request["draft"], "CPU")
        start = time.perf_counter()
        tokenizer = openvino_genai.Tokenizer(request["folder"])
        self.pipe = openvino_genai.ContinuousBatchingPipeline(request["folder"], tokenizer, scheduler, "CPU", **options)
        self.generate({"prompts": [request["first_prompt"]], "output_len": 4})
        return {"startup_s": time.perf_counter() - start, "version": openvino_genai.__version__}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        prompts, pipe, going_on = request["prompts"], self.pipe, self.genai.GenerationStatus.RUNNING
        tensors = [self.openvino.Tensor(self._row(prompt)) for prompt in prompts]
        configs = [self._config(request, number) for number in range(len(prompts))]
        stopwatch, queue = Stopwatch(len(prompts)), Queue(len(prompts), request.get("at_once"))
        handles: dict[int, Any] = {}
        while queue.has_work:
            for b in queue.start():
                handles[b] = pipe.add_request(next(self.names), tensors[b], configs[b])
            pipe.step()
            for b, handle in list(handles.items()):
                status = handle.get_status()
                while handle.can_read():
                    stopwatch.give(b, list(next(iter(handle.read().values())).generated_ids))
                if status != going_on:
                    if status != self.genai.GenerationStatus.FINISHED:
                        raise RuntimeError(f"a request ended as {status}")
                    del handles[b]
                    queue.running -= 1
        return stopwatch.stop()

    def _row(self, prompt: list[int]) -> Any:
        import numpy as np

        return np.array([prompt], dtype=np.int64)

    def _config(self, request: dict[str, Any], number: int) -> Any:
        ends, temperature = request.get("ends"), request.get("temperature", 0.0)
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = request["output_len"], not ends
        config.stop_token_ids = set(ends or ())
        if temperature:
            config.do_sample, config.temperature, config.top_p, config.rng_seed = True, temperature, 1.0, number
        if self.num_drafts:
            config.num_assistant_tokens = self.num_drafts
        return config


if __name__ == "__main__":
    peer = OpenVino()
    serve({"load": peer.load, "generate": peer.generate})
