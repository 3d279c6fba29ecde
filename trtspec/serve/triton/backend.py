"""Models that Triton's python backend calls: the base of those with an engine, and the one of the llmapi layout.

All requests in flight share the engine's steps. Triton calls `execute` with new requests, and the call returns at once.
One thread of our own sends the engine's outputs, and checks for requests whose client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import itertools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trtspec.engine.background import Generation
from trtspec.errors import CapacityError, EngineError, RequestError, UnsupportedError
from trtspec.llm import LLM, Prompt
from trtspec.outputs import Logprob, SpeculationStats
from trtspec.sampling_params import SamplingParams
from trtspec.serve.triton.configs import LAYOUTS, ModelSpec, TensorSpec
from trtspec.serve.triton.fields import sampling_params, stop_fields
from trtspec.serve.triton.metrics import TritonMetrics
from trtspec.serve.triton.numpy_strings import repair
from trtspec.serve.triton.settings import Settings
from trtspec.serve.triton.tensors import Values, make_tensors, read_inputs, requested
from trtspec.text import Tokenizer

logger = logging.getLogger(__name__)

FIRST_DELAY, MAX_DELAY = 1.0, 30.0
"""Seconds from the second failure in a row to the next engine, and the longest such delay. The first has no delay."""
SOUND_SECONDS = 60.0
"""Seconds; the failure of an engine that ran for longer counts as the first in a row."""
MOST_FAILURES = 5
"""Number of failures in a row after which the server ends if no engine can be started."""


@dataclass(frozen=True)
class Job:
    """The work for one request. prefix_text, prefix_ids: its prompt, if the output is to begin with it, else empty."""

    prompt: Prompt
    params: SamplingParams
    streaming: bool
    values: Values
    prefix_text: str = ""
    prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Part:
    """The content of one response: the output of a step when streaming, else the whole output."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None
    speculation: SpeculationStats  # counts so far
    logprobs: Sequence[float]  # of its tokens without the prefix; empty if the job asks for none
    cumulative_logprob: float  # of all tokens so far


@dataclass
class Running:
    """A Triton request in flight."""

    request_id: str  # the client's, "" if it gave none
    sender: Any
    outputs: list[TensorSpec]  # outputs that it wants
    job: Job
    generation: Generation
    cancelled: bool = False
    answered: bool = False  # the final response is sent; the server has closed the sender


class EngineHost:
    """A Triton model that holds one trtspec.LLM; subclasses define the tensors of a layout."""

    spec: ClassVar[ModelSpec]

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's call: load the engine. An exception is the reason why the model is not ready."""
        self.pb = backend_utils()
        self.decoupled = is_decoupled(args)
        settings = Settings.read(Path(args["model_repository"]) / args["model_version"])
        self.period = settings.cancellation_check_period
        self._options = dict(settings.llm)
        self._failures = 0  # number in a row
        self._start()
        self.metrics = TritonMetrics(self.pb, args["model_name"])
        self._numbers = itertools.count()
        self._running: dict[int, Running] = {}  # shared by two threads: every operation on it is atomic
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trtspec-triton", daemon=True)
        self._thread.start()
        self._watcher = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def execute(self, requests: Sequence[Any]) -> None:
        """Triton's call: start the requests. Each is answered through its response sender, also with an error."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                values = read_inputs(request, self.spec.inputs)
                if any(values.get("stop", ())):
                    self._stop(request.request_id())
                    sender.send(self.pb.InferenceResponse([]), self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    continue
                job = self.job(values)
                check_streaming(job.streaming, self.decoupled)
                if not self.ready:
                    raise Restarting("the engine has failed, and another is being started; try again soon")
                generation = self.llm.generate_async(job.prompt, job.params)
            except Exception as error:
                send_error(self.pb, sender, error)
                continue
            number = next(self._numbers)
            outputs = requested(request, self.spec.outputs)
            self._running[number] = Running(request.request_id(), sender, outputs, job, generation)
            asyncio.run_coroutine_threadsafe(self._serve(number), self._loop)

    def is_model_ready(self) -> bool:
        """Triton's call, in versions that have it: whether this model's /ready reports ready."""
        return self.ready

    def finalize(self) -> None:
        """Triton's call when the model is unloaded: end the requests that still run, and free the engine."""
        self._watcher.cancel()
        self.llm.shutdown()
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        # Metrics, and senders in reference cycles, are the server's: free them while it can still be notified.
        del self.metrics
        gc.collect()

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None, "trtspec triton-repo writes no repository without one"
        return tokenizer

    def job(self, values: Values) -> Job:
        """Job that the inputs ask for. Raises RequestError or UnsupportedError."""
        raise NotImplementedError

    def outputs(self, job: Job, part: Part) -> Values:
        """Outputs of one response, except those about drafts."""
        raise NotImplementedError

    async def _serve(self, number: int) -> None:
        running = self._running[number]
        generation = running.generation
        prefix = (running.job.prefix_text, running.job.prefix_ids)
        cumulative = 0.0
        try:
            if running.job.streaming:
                async for delta in generation:
                    logprobs = drawn_logprobs(delta.logprobs)
                    cumulative += sum(logprobs)
                    part = Part(
                        prefix[0] + delta.text,
                        (*prefix[1], *delta.token_ids),
                        delta.finish_reason,
                        delta.stop_reason,
                        generation.speculation,
                        logprobs,
                        cumulative,
                    )
                    prefix = ("", ())
                    self._answer(running, part, delta.error)
            else:
                output = (await generation).outputs[0]
                part = Part(
                    prefix[0] + output.text,
                    (*prefix[1], *output.token_ids),
                    output.finish_reason,
                    output.stop_reason,
                    output.speculation,
                    drawn_logprobs(output.logprobs),
                    output.cumulative_logprob or 0.0,
                )
                self._answer(running, part, output.error)
        except Exception as error:
            generation.abort()
            send_error(self.pb, running.sender, error)
        finally:
            del self._running[number]

    def _answer(self, running: Running, part: Part, error: str | None) -> None:
        if error is not None:
            raise EngineError(error)
        if running.cancelled:
            raise Cancelled("the request was cancelled by its client")
        outputs = {**self.outputs(running.job, part), **speculation_outputs(part.speculation)}
        batched = self.spec.max_batch_size > 0
        response = self.pb.InferenceResponse(make_tensors(self.pb, running.outputs, outputs, batched))
        running.answered = part.finish_reason is not None
        flags = self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if running.answered else 0
        running.sender.send(response, flags)

    async def _watch(self) -> None:
        """Periodically end requests whose clients have gone, update Triton's metrics, and replace a failed engine."""
        while True:
            await asyncio.sleep(self.period)
            for running in list(self._running.values()):
                if not (running.answered or running.cancelled) and running.sender.is_cancelled():
                    running.cancelled = True
                    running.generation.abort()
            self.metrics.update(self.llm, len(self._running))
            if self.llm.failure is not None:
                await self._restart()

    def _start(self) -> None:
        options = dict(self._options)
        self.llm = LLM(options.pop("model"), **options)
        self._started, self.ready = time.monotonic(), True

    async def _restart(self) -> None:
        """Replace an engine that failed, after a delay that grows with the number of failures.

        If this process cannot start an engine (its GPU context may be broken), end the server: otherwise it would
        report ready for ever with a model that is not.
        """
        self.ready = False
        logger.error("the engine has failed, another is started in its place: %r", self.llm.failure)
        self.metrics.failed()
        if time.monotonic() - self._started > SOUND_SECONDS:
            self._failures = 0
        while self._running:  # their own tasks answer them with the error
            await asyncio.sleep(self.period)
        with contextlib.suppress(EngineError):  # some of its files could not be written
            self.llm.shutdown()
        gc.collect()  # tracebacks hold the old engine's memory
        while not self.ready:
            await asyncio.sleep(min(FIRST_DELAY * (2**self._failures - 1), MAX_DELAY))
            self._failures += 1
            try:
                await asyncio.to_thread(self._start)
            except Exception:
                logger.exception("no engine can be started in the place of the one that failed")
                if self._failures >= MOST_FAILURES:
                    # Triton 2.51 reports a model as ready after its process has ended, so end the server as well
                    os.kill(os.getppid(), signal.SIGTERM)
                    os._exit(1)

    async def _drain(self) -> None:
        """Wait until every request is answered; those that shutdown ended are answered with an error."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self, request_id: str) -> None:
        """End the requests with this id; each is answered with its output so far."""
        if not request_id:
            raise RequestError("input stop ends the requests of the same request id, and this one has none; give it")
        for running in list(self._running.values()):
            if running.request_id == request_id:
                running.generation.abort()


def is_decoupled(args: Mapping[str, str]) -> bool:
    """Whether a request may get several responses. args: those of Triton's call of initialize."""
    policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
    return bool(policy.get("decoupled", False))


def check_streaming(asked: bool, decoupled: bool) -> None:
    """Raise RequestError for a stream if each request is answered once."""
    if asked and not decoupled:
        raise RequestError(
            "this model repository answers a request once; write it again with trtspec triton-repo, without "
            "--no-streaming, or ask for no stream"
        )


class Restarting(Exception):
    """An error of a request while there is no engine."""


class Cancelled(Exception):
    """An error of a request whose client does not want the answer any more."""


def backend_utils() -> Any:
    """The module that the server provides to its python models; it exists nowhere else."""
    pb = importlib.import_module("triton_python_backend_utils")
    repair(pb)
    return pb


def send_error(pb: Any, sender: Any, error: Exception) -> None:
    """End one request with an error; the others go on."""
    codes = pb.TritonError
    code = codes.INTERNAL
    if isinstance(error, Cancelled):
        code = codes.CANCELLED
    elif isinstance(error, Restarting):
        code = codes.UNAVAILABLE
    elif isinstance(error, UnsupportedError):
        code = codes.UNSUPPORTED
    elif isinstance(error, (RequestError, CapacityError)):
        code = codes.INVALID_ARG
    response = pb.InferenceResponse(error=codes(str(error), code))
    try:
        sender.send(response, pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception:  # the server has already closed this request
        logger.exception("could not answer a request that failed: %s", error)


def speculation_outputs(stats: SpeculationStats) -> Values:
    """Outputs about drafts: share accepted, 0.0 if none were offered; number accepted; number offered."""
    offered, accepted = stats.num_draft_tokens, stats.num_accepted_tokens
    return {
        "acceptance_rate": [accepted / offered if offered else 0.0],
        "total_accepted_draft_tokens": [accepted],
        "total_draft_tokens": [offered],
    }


def drawn_logprobs(entries: Iterable[Mapping[int, Logprob]] | None) -> list[float]:
    """Logprob of each drawn token, with which its entry begins."""
    return [next(iter(entry.values())).logprob for entry in entries or ()]


class LlmApiModel(EngineHost):
    """The one model of the llmapi layout: text in, text out."""

    spec = LAYOUTS["llmapi"][0]

    _FIELDS: ClassVar[Mapping[str, str]] = {
        f"sampling_param_{name}": name
        for name in ("temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed")
    }

    def job(self, values: Values) -> Job:
        """Job for the one prompt in text_input. RequestError for any other number of prompts."""
        prompts = values["text_input"]
        if len(prompts) != 1:
            raise RequestError(f"input text_input holds {len(prompts)} prompts; send one request for each")
        fields = sampling_params(values, self._FIELDS)
        fields |= stop_fields(self.tokenizer, self._words(values.get("sampling_param_stop", ())))
        if any(values.get("return_cumulative_logprob", ())):
            fields["logprobs"] = 0
        echo = not values.get("sampling_param_exclude_input_from_output", [True])[0]
        return Job(
            prompts[0],
            SamplingParams.tensorrt_llm(**fields),
            any(values.get("streaming", ())),
            values,
            prompts[0] if echo else "",
        )

    def outputs(self, job: Job, part: Part) -> Values:
        """Outputs of one response. finish_reason and stop_reason are "" until there is one."""
        outputs: dict[str, list[Any]] = {"text_output": [part.text]}
        if any(job.values.get("return_finish_reason", ())):
            outputs["finish_reason"] = [part.finish_reason or ""]
        if any(job.values.get("return_stop_reason", ())):
            stop = part.stop_reason
            outputs["stop_reason"] = [(self.tokenizer.token(stop) if isinstance(stop, int) else stop) or ""]
        if job.params.logprobs is not None:
            outputs["cumulative_logprob"] = [part.cumulative_logprob]
        return outputs

    def _words(self, words: Sequence[str]) -> list[tuple[str, list[int]]]:
        return [(word, self.tokenizer.encode(word, add_special_tokens=False)) for word in words if word]
