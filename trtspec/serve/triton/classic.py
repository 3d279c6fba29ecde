"""The models of the classic layout: preprocessing, the engine, postprocessing, and the one that calls them (BLS)."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from trtspec.errors import RequestError
from trtspec.sampling_params import SamplingParams
from trtspec.serve.triton.backend import (
    Cancelled,
    EngineHost,
    Job,
    Part,
    backend_utils,
    check_streaming,
    is_decoupled,
    send_error,
)
from trtspec.serve.triton.configs import (
    FROM_PREPROCESSING,
    LAYOUTS,
    TO_ENGINE,
    TO_PREPROCESSING,
    ModelSpec,
    TensorSpec,
)
from trtspec.serve.triton.fields import sampling_params, stop_fields
from trtspec.serve.triton.settings import CANCELLATION_CHECK_MS
from trtspec.serve.triton.tensors import Values, make_tensors, read_inputs, read_tensors, requested
from trtspec.text import Tokenizer

logger = logging.getLogger(__name__)

_SPECS: dict[str, ModelSpec] = {model.name: model for model in LAYOUTS["classic"]}
NUM_BLS_THREADS = 128
"""Number of requests that the BLS model handles at once; further ones wait."""
KEPT_SECONDS = 5.0
"""Seconds for which the BLS model keeps the responses that it received; BlsModel._keep says why."""


class EngineModel(EngineHost):
    """The model tensorrt_llm, which holds the engine: token ids in, token ids and text out."""

    spec = _SPECS["tensorrt_llm"]

    _FIELDS: ClassVar[Mapping[str, str]] = {
        "request_output_len": "max_tokens",
        "min_tokens": "min_tokens",
        "temperature": "temperature",
        "runtime_top_k": "top_k",
        "runtime_top_p": "top_p",
        "repetition_penalty": "repetition_penalty",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
        "seed": "seed",
    }

    def job(self, values: Values) -> Job:
        """Job for the first input_lengths of input_ids. RequestError for a length outside input_ids."""
        ids, length = values["input_ids"], values["input_lengths"][0]
        if not 0 < length <= len(ids):
            raise RequestError(
                f"input input_lengths = {length}, and input_ids has {len(ids)}; say how many of them count"
            )
        prompt = ids[:length]
        fields = sampling_params(values, self._FIELDS)
        words = unpacked_words(values.get("stop_words_list", []))
        fields |= stop_fields(self.tokenizer, [(self.tokenizer.decode(ids, False), ids) for ids in words])
        if "end_id" in values:
            end = values["end_id"][0]
            fields["ignore_eos"] = True
            fields["stop_token_ids"] += [end] if end >= 0 else []  # -1 = no token ends the text
        if any(values.get("return_log_probs", ())):
            fields["logprobs"] = 0
        echo = not values.get("exclude_input_in_output", [True])[0]
        return Job(
            prompt,
            SamplingParams.tensorrt_llm(**fields),
            any(values.get("streaming", ())),
            values,
            self.tokenizer.decode(prompt) if echo else "",
            tuple(prompt) if echo else (),
        )

    def outputs(self, job: Job, part: Part) -> Values:
        """Outputs of one response: ids, text and, if the request asks for them, log-probabilities.

        Without tokens, output_ids holds pad_id or 0, output_log_probs holds 0.0, and sequence_length is 0, because the
        server refuses some shapes without elements. A prompt at the beginning has ids but no log-probabilities.
        """
        outputs = {
            "output_ids": list(part.token_ids) or job.values.get("pad_id", [0]),
            "sequence_length": [len(part.token_ids)],
            "text_output": [part.text],
        }
        if job.params.logprobs is not None:
            outputs["cum_log_probs"] = [part.cumulative_logprob]
            outputs["output_log_probs"] = list(part.logprobs) or [0.0]
        return outputs


def packed_words(words: Sequence[Sequence[int]]) -> list[int]:
    """Words of token ids as TensorRT-LLM's stop_words_list, flattened.

    Its first row holds all ids, its second row the end of each word. The rows are padded with 0 and with -1 to the same
    length, which is at least 1.
    """
    ids = [token for word in words for token in word]
    ends = list(itertools.accumulate(len(word) for word in words))
    width = max(len(ids), 1)
    return [*ids, *[0] * (width - len(ids)), *ends, *[-1] * (width - len(ends))]


def unpacked_words(flat: Sequence[int]) -> list[list[int]]:
    """Words of a flattened stop_words_list. RequestError if the ends are not in order."""
    width = len(flat) // 2
    ids, ends = flat[:width], [end for end in flat[width:] if end >= 0]
    starts = [0, *ends[:-1]]
    if any(not start < end <= width for start, end in zip(starts, ends, strict=False)):
        raise RequestError(f"input stop_words_list: the second row says that words end at {ends} of {width} ids")
    return [list(ids[start:end]) for start, end in zip(starts, ends, strict=False)]


class _TextModel:
    """A model that answers at once and needs only the tokenizer."""

    spec: ClassVar[ModelSpec]

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's call: load the tokenizer."""
        self.pb = backend_utils()
        config = json.loads(args["model_config"])
        folder = config["parameters"]["tokenizer_dir"]["string_value"]
        tokenizer = Tokenizer.from_folder(folder)
        if tokenizer is None:
            raise RequestError(f"{folder} has no tokenizer.json; write the repository again with trtspec triton-repo")
        self.tokenizer = tokenizer

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Triton's call: return one response for each request."""
        return [self._response(request) for request in requests]

    def _response(self, request: Any) -> Any:
        try:
            outputs = self.outputs(read_inputs(request, self.spec.inputs))
            wanted = requested(request, self.spec.outputs)
            return self.pb.InferenceResponse(make_tensors(self.pb, wanted, outputs, batched=True))
        except Exception as error:
            return self.pb.InferenceResponse(error=self.pb.TritonError(str(error), self.pb.TritonError.INVALID_ARG))

    def outputs(self, values: Values) -> Values:
        """Outputs for these inputs."""
        raise NotImplementedError


class Preprocessing(_TextModel):
    """The model preprocessing: text to token ids."""

    spec = _SPECS["preprocessing"]

    def outputs(self, values: Values) -> Values:
        """Token ids of the query and of the stop words. RequestError for an empty query."""
        ids = self.tokenizer.encode(values["QUERY"][0])
        if not ids:
            raise RequestError("input QUERY is empty; give at least one token")
        words = [self.tokenizer.encode(word, add_special_tokens=False) for word in values.get("STOP_WORDS_DICT", ())]
        return {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": [len(ids)],
            "REQUEST_OUTPUT_LEN": values["REQUEST_OUTPUT_LEN"],
            "STOP_WORDS_IDS": packed_words([word for word in words if word]),
        }


class Postprocessing(_TextModel):
    """The model postprocessing: token ids to text. Text that the engine already made of them is passed on."""

    spec = _SPECS["postprocessing"]

    def outputs(self, values: Values) -> Values:
        """Text of the response: the engine's text if present, else that of the token ids."""
        text = values.get("TEXT")
        if text is None:
            text = [self.tokenizer.decode(values["TOKENS_BATCH"][: values["SEQUENCE_LENGTH"][0]])]
        return {"OUTPUT": text}


class InnerError(Exception):
    """An error from a model that was called: a pb.TritonError, which is passed on unchanged."""

    def __init__(self, error: Any) -> None:
        super().__init__(error.message())
        self.error = error


@dataclass
class _Watched:
    """A request that the engine has, or soon will have."""

    sender: Any
    stop: Values  # inputs that make the engine stop it
    gone: bool = False  # its client has gone


class BlsModel:
    """The model tensorrt_llm_bls, which calls the other models for each request, each in a thread of its own.

    Another thread checks every CANCELLATION_CHECK_MS for clients that have gone. It also checks requests that wait, and
    requests that are answered once.
    """

    spec = _SPECS["tensorrt_llm_bls"]

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's call: start the threads."""
        self.pb = backend_utils()
        self.decoupled = is_decoupled(args)
        self._threads = ThreadPoolExecutor(NUM_BLS_THREADS, thread_name_prefix="trtspec-bls")
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, Any]] = deque()  # (time, responses)
        self._watched: dict[str, _Watched] = {}  # by request id
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="trtspec-bls-watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Triton's call: start the requests, and return."""
        for request in requests:
            self._threads.submit(self._serve, request, request.get_response_sender())

    def finalize(self) -> None:
        """Triton's call when the model is unloaded: end the threads."""
        self._threads.shutdown()
        self._over.set()
        self._watcher.join()
        self._kept.clear()
        gc.collect()  # for the reason in EngineHost.finalize

    def _serve(self, request: Any, sender: Any) -> None:
        final = self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            values = read_inputs(request, self.spec.inputs)
            streaming = any(values.get("stream", ()))
            check_streaming(streaming, self.decoupled)
            wanted = requested(request, self.spec.outputs)
            with contextlib.closing(self._generate(values, sender)) as steps:
                if streaming:
                    for outputs in steps:
                        sender.send(self._response(wanted, outputs), 0)
                else:
                    [whole] = steps
            if streaming:
                sender.send(flags=final)
            else:
                sender.send(self._response(wanted, whole), final)
        except InnerError as error:
            sender.send(self.pb.InferenceResponse(error=error.error), final)
        except Exception as error:
            send_error(self.pb, sender, error)

    def _generate(self, values: Values, sender: Any) -> Generator[dict[str, list[Any]], None, None]:
        """Yield the engine's outputs, of each step or of all steps. Raises Cancelled if the client has gone."""
        name = uuid.uuid4().hex
        inputs = {own: values[theirs] for own, theirs in TO_PREPROCESSING if theirs in values}
        [tokens] = self._call("preprocessing", inputs, name)
        inputs = {own: tokens[theirs] for own, theirs in FROM_PREPROCESSING}
        inputs.update((own, values[theirs]) for own, theirs in TO_ENGINE if theirs in values)
        watched = _Watched(sender, {**inputs, "stop": [True]})
        with self._lock:
            self._watched[name] = watched
        steps, ended = self._call("tensorrt_llm", inputs, name), False
        try:
            # `yield from` would close the steps before they are stopped, and closing waits for the last step
            for outputs in steps:  # noqa: UP028
                yield outputs
            ended = True
        finally:
            with self._lock:
                del self._watched[name]
            if not ended:
                list(self._call("tensorrt_llm", watched.stop, name))
                steps.close()
        if watched.gone:
            raise Cancelled("the request was cancelled by its client")

    def _watch(self) -> None:
        """Stop the requests whose clients have gone.

        Each is stopped again and again until it is answered, because the engine may not have it yet.
        """
        while not self._over.wait(CANCELLATION_CHECK_MS / 1000):
            for name, watched in list(self._watched.items()):
                with self._lock:  # a sender must not be queried after its last response
                    if name not in self._watched or not watched.sender.is_cancelled():
                        continue
                    watched.gone = True
                try:
                    list(self._call("tensorrt_llm", watched.stop, name))
                except Exception:
                    logger.exception("could not stop a request whose client has gone")

    def _call(self, model: str, inputs: Values, request_id: str) -> Generator[dict[str, list[Any]], None, None]:
        """Call a model and yield the outputs of each response. Raises InnerError for an error.

        If the generator is closed early, it still waits for the last response.
        """
        spec = _SPECS[model]
        request = self.pb.InferenceRequest(
            model_name=model,
            request_id=request_id,
            requested_output_names=[output.name for output in spec.outputs],
            inputs=make_tensors(self.pb, spec.inputs, inputs, batched=True),
        )
        decoupled = self.decoupled and spec.decoupled
        responses = request.exec(decoupled=True) if decoupled else iter([request.exec()])
        try:
            for response in responses:
                if response.has_error():
                    raise InnerError(response.error())
                if response.output_tensors():  # the last of several responses has none
                    yield read_tensors(response.output_tensors(), spec.outputs)
        finally:
            for _ in responses:
                pass
            self._keep(responses)

    def _keep(self, responses: Any) -> None:
        """Hold responses for KEPT_SECONDS, so that the server drops them before this model does.

        Whoever drops a response last frees its tensors. A thread of tritonserver 2.51 drops it after some milliseconds,
        and would free the tensors without the interpreter's lock.
        """
        now = time.monotonic()
        with self._lock:
            self._kept.append((now, responses))
            while now - self._kept[0][0] > KEPT_SECONDS:
                self._kept.popleft()

    def _response(self, wanted: Sequence[TensorSpec], outputs: Values) -> Any:
        return self.pb.InferenceResponse(make_tensors(self.pb, wanted, outputs, batched=True))
