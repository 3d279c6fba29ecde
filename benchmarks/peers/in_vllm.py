"""vLLM on the CPU, with its defaults: compiled, chunked prefill. Runs in its own environment.

Prefix caching is off unless "load" has prefix_caching. The environment's variables decide where its engine core runs
(environments.vllm_variables).
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from benchmarks.peers.worker import Queue, Stopwatch, serve

KEPT_TO_AVX2 = os.environ.get("TRTSPEC_CPU_ISA") == "avx2"


def keep_to_avx2() -> None:
    """Make torch, by which vLLM selects its kernels, report no AVX-512, as on a machine without it."""
    import torch

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported", "_is_amx_tile_supported"):
        assert hasattr(torch.cpu, name), name
        setattr(torch.cpu, name, lambda: False)


class Vllm:
    def __init__(self) -> None:
        self._names = itertools.count()
        self.llm: Any = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        if KEPT_TO_AVX2:
            keep_to_avx2()
        import vllm

        self.vllm = vllm
        start = time.perf_counter()
        self.llm = vllm.LLM(
            request["model"],
            speculative_config=request["speculation"],
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=request["max_len"],
            max_num_seqs=request["max_batch"],
            max_num_batched_tokens=request["max_num_tokens"],
            enable_prefix_caching=request.get("prefix_caching", False),
        )
        self.generate({"prompts": [request["first_prompt"]], "output_len": 1})
        return {"startup_s": time.perf_counter() - start, "version": vllm.__version__}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        engine, prompts = self.llm.llm_engine, request["prompts"]
        params = self.vllm.SamplingParams(
            temperature=request.get("temperature", 0.0),
            max_tokens=request["output_len"],
            ignore_eos=not request.get("ends", False),
            stop_token_ids=request.get("ends") or None,
            detokenize=False,
            output_kind=self.vllm.sampling_params.RequestOutputKind.DELTA,
        )
        stopwatch, queue = Stopwatch(len(prompts)), Queue(len(prompts), request.get("at_once"))
        rows = {}
        while queue.has_work:
            for b in queue.start():
                name = f"{next(self._names)}"
                rows[name] = b
                engine.add_request(name, {"prompt_token_ids": prompts[b]}, params)
            for output in engine.step():
                stopwatch.give(rows[output.request_id], list(output.outputs[0].token_ids))
                queue.running -= output.finished
        return stopwatch.stop()

    def close(self) -> None:
        """End vLLM's own processes, if it has any; otherwise their end takes a long time."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    peer = Vllm()
    serve({"load": peer.load, "generate": peer.generate})
    peer.close()
