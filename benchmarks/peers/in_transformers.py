"""transformers: plain, prompt lookup and assisted generation. Runs in its own environment."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Any

from benchmarks.peers.worker import Stopwatch, serve


class Transformers:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.torch, self.transformers = torch, transformers
        start = time.perf_counter()
        self.model = self._open(request["model"])
        self.options = self._options(request["speculation"])
        self.generate({"prompts": [request["first_prompt"]], "output_len": 1})
        return {"startup_s": time.perf_counter() - start, "version": transformers.__version__}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate for prompts of one length, all at once or one after another."""
        assert request.get("at_once") in (None, 1, len(request["prompts"])), "no queue"
        if request.get("at_once") == 1:
            replies = [self.generate({**request, "prompts": [one], "at_once": None}) for one in request["prompts"]]
            return {name: sum((reply[name] for reply in replies[1:]), replies[0][name]) for name in replies[0]}
        prompts, output_len = request["prompts"], request["output_len"]
        stopwatch = Stopwatch(len(prompts))
        lengths = [len(prompt) for prompt in prompts]

        class Watch(self.transformers.StoppingCriteria):  # type: ignore[misc, name-defined]
            """A criterion that is called after every step with all tokens so far; it stops nothing."""

            def __call__(criteria, input_ids: Any, scores: Any, **_: Any) -> Any:
                for b, row in enumerate(input_ids.tolist()):
                    stopwatch.give(b, row[lengths[b] + len(stopwatch.timed.outputs[b]) :])
                return self.torch.zeros(len(prompts), dtype=self.torch.bool)

        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            result = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=output_len,
                pad_token_id=0,
                **_sampling(request),
                stopping_criteria=[Watch()],
                **self.options,
            )
        reply = stopwatch.stop()
        outputs = [_until(row, request.get("ends") or ()) for row in result[:, lengths[0] :].tolist()]
        return {**reply, "outputs": outputs}

    def _open(self, folder: str) -> Any:
        model = self.transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        model.generation_config.eos_token_id = None  # generation goes on past it
        return model

    def _options(self, speculation: dict[str, Any] | None) -> dict[str, Any]:
        if speculation is None:
            return {}
        K = speculation["num_speculative_tokens"]
        if speculation["method"] == "ngram":
            return {"prompt_lookup_num_tokens": K, "max_matching_ngram_size": speculation["prompt_lookup_max"]}
        assistant = self._open(speculation["model"])
        assistant.generation_config.num_assistant_tokens = K
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0  # always K drafts
        return {"assistant_model": assistant}


def _sampling(request: dict[str, Any]) -> dict[str, Any]:
    temperature = request.get("temperature", 0.0)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    return {"do_sample": False, "eos_token_id": request.get("ends") or None, **how}


def _until(ids: list[int], ends: Collection[int]) -> list[int]:
    """The ids up to and including the first of `ends`."""
    return ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids)) + 1]


if __name__ == "__main__":
    peer = Transformers()
    serve({"load": peer.load, "generate": peer.generate})
