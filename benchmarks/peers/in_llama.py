"""llama.cpp through llama-cpp-python's low-level interface. Runs in its own environment.

Decoding is llama_decode over all sequences at once, the arg-max of each row by numpy, and nothing else. Prompt lookup
verifies the drafts of llama-cpp-python's own LlamaPromptLookupDecoding, for one sequence.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.worker import Stopwatch, serve

FILE_TYPES = {"Q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": api.LLAMA_FTYPE_MOSTLY_Q4_0}
BITS_PER_WEIGHT = {"BF16": 16.0, "Q8_0": 8.5, "Q4_0": 4.5}  # of the embedding, scales included

Row = tuple[int, int, int, bool]  # token, sequence, position, whether its logits are needed


class Llama:
    def convert(self, request: dict[str, Any]) -> dict[str, Any]:
        """Convert the checkpoint to GGUF, in the format asked for, in a folder of its own. Existing files are kept."""
        checkpoint, folder, kind = Path(request["model"]), Path(request["gguf"]), request["format"]
        folder.mkdir(parents=True, exist_ok=True)
        plain = folder / "BF16.gguf"
        if not plain.is_file():
            write_gguf(checkpoint, plain)
        file = plain if kind == "BF16" else folder / f"{kind}-{api.__version__}.gguf"
        if not file.is_file():
            params = api.llama_model_quantize_default_params()
            params.ftype = FILE_TYPES[kind]
            params.nthread = int(os.environ["OMP_NUM_THREADS"])
            staging = file.with_name(file.name + ".tmp")
            if api.llama_model_quantize(str(plain).encode(), str(staging).encode(), ctypes.byref(params)):
                staging.unlink(missing_ok=True)
                raise RuntimeError(f"llama.cpp could not quantise {plain} to {kind}")
            os.replace(staging, file)
        return {"file": str(file)}

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load request["file"], which must exist."""
        self.max_batch, self.max_num_tokens = request["max_batch"], request["max_num_tokens"]
        self.lookup = None
        if request["speculation"] is not None:
            K, largest = (request["speculation"][key] for key in ("num_speculative_tokens", "prompt_lookup_max"))
            self.lookup = LlamaPromptLookupDecoding(max_ngram_size=largest, num_pred_tokens=K)
        start = time.perf_counter()
        self.model = api.llama_model_load_from_file(request["file"].encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx = request["max_len"] * self.max_batch  # shared by the sequences
        params.n_seq_max = self.max_batch
        params.n_batch = self.max_num_tokens
        params.n_outputs_max_per_seq = 1 if self.lookup is None else self.lookup.num_pred_tokens + 1
        params.n_threads = params.n_threads_batch = int(os.environ["OMP_NUM_THREADS"])
        self.context = self.model and api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not load {request['file']}")
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(self.max_num_tokens, 0, 1)
        self.generate({"prompts": [request["first_prompt"]], "output_len": 1})
        startup_s = time.perf_counter() - start
        weight_bytes = api.llama_model_size(self.model)
        if not request["tied"]:  # a step then reads only a row of the embedding
            embedding = self.vocab_size * api.llama_model_n_embd(self.model)
            weight_bytes -= int(embedding * BITS_PER_WEIGHT[request["format"]] / 8)
        return {"startup_s": startup_s, "version": api.__version__, "weight_bytes": weight_bytes}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        prompts, output_len = request["prompts"], request["output_len"]
        api.llama_memory_clear(api.llama_get_memory(self.context), False)
        stopwatch = Stopwatch(len(prompts))
        rows = [(t, b, i, i + 1 == len(p)) for b, p in enumerate(prompts) for i, t in enumerate(p)]
        tokens: list[int] = []
        for begin in range(0, len(rows), self.max_num_tokens):
            tokens += self._run(rows[begin : begin + self.max_num_tokens])
        for b, token in enumerate(tokens):
            stopwatch.give(b, [token])
        if self.lookup is not None:
            self._speculate(prompts[0], output_len, stopwatch)
        else:
            for step in range(output_len - 1):
                tokens = self._run([(t, b, len(prompts[b]) + step, True) for b, t in enumerate(tokens)])
                for b, token in enumerate(tokens):
                    stopwatch.give(b, [token])
        return stopwatch.stop()

    def _speculate(self, prompt: list[int], output_len: int, stopwatch: Stopwatch) -> None:
        """Decode the one sequence to its end: verify drafts, keep the tokens that the model draws, discard the rest."""
        assert self.lookup is not None
        output = stopwatch.timed.outputs[0]
        while len(output) < output_len:
            context = prompt + output
            room = output_len - len(output) - 1
            drafts = self.lookup(np.array(context, dtype=np.intc))[:room].tolist()
            start = len(context) - 1
            drawn = self._run([(t, 0, start + i, True) for i, t in enumerate([context[-1], *drafts])])
            kept = 0
            while kept < len(drafts) and drafts[kept] == drawn[kept]:
                kept += 1
            api.llama_memory_seq_rm(api.llama_get_memory(self.context), 0, start + kept + 1, -1)
            stopwatch.give(0, drawn[: kept + 1])

    def _run(self, rows: list[Row]) -> list[int]:
        """Run llama_decode once, and return the most likely next token of every row whose logits are needed."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, sequence, position, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = api.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode of {len(rows)} rows returned {code}")
        return [self._argmax(i) for i, row in enumerate(rows) if row[3]]

    def _argmax(self, row: int) -> int:
        address = ctypes.addressof(api.llama_get_logits_ith(self.context, row).contents)
        logits = (ctypes.c_float * self.vocab_size).from_address(address)
        return int(np.frombuffer(logits, dtype=np.float32).argmax())


if __name__ == "__main__":
    peer = Llama()
    serve({"convert": peer.convert, "load": peer.load, "generate": peer.generate})
