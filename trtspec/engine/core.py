"""EngineCore: accepts requests, runs steps, and drops requests that have finished."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.engine.activity_log import ActivityLog
from trtspec.engine.limits import LogitLimits
from trtspec.engine.logprobs import LogprobRecord
from trtspec.engine.request import Request
from trtspec.engine.stats import EngineStats, TimedExecutable
from trtspec.engine.step import Emission, StepLoop
from trtspec.errors import CapacityError, EngineError, RequestError
from trtspec.outputs import SpeculationStats
from trtspec.sampling_params import RequestSampling, SamplingParams, sample_seed
from trtspec.text import TextStream, Tokenizer
from trtspec.verify.grammar import GrammarCompiler, Guide


class EngineCore:
    """An engine, which owns the loop.

    It is not thread-safe: one caller adds requests and runs steps (see EngineThread).
    """

    def __init__(
        self,
        loop: StepLoop,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        max_seq_len: int,
        max_input_len: int | None,
        seed: int,
        use_generation_config: bool,
        executables: Sequence[TimedExecutable],
        debug: bool = False,
        limits: LogitLimits | None = None,
    ) -> None:
        """Create an engine without requests. limits: None = none."""
        self.loop = loop
        self.model = model
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.max_input_len = max_input_len
        self.seed = seed
        self.limits = limits or LogitLimits("")
        self.defaults = self.limits.without(model.generation_defaults if use_generation_config else {})
        self.executables = executables  # target first, then the draft's
        self.debug = debug
        self.stats = EngineStats()
        self.log: ActivityLog | None = None  # None: no log
        self.on_close: Callable[[], None] = lambda: None  # called at the end of close() to release further resources
        tokenizer_eos = tokenizer.eos_token_id if tokenizer is not None else None
        self.eos_ids = model.eos_token_ids | (frozenset() if tokenizer_eos is None else {tokenizer_eos})
        self._compiler: GrammarCompiler | None = None  # made for the first request that needs it
        self._next_id = 0
        self._requests: dict[int, Request] = {}

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Request]:
        """Queue one prompt and return its n samples.

        RequestError or CapacityError, with nothing queued, if it cannot run.
        """
        samples = self.make_request(prompt_ids, params)
        self.queue(samples)
        return samples

    def make_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Request]:
        """Check one prompt, and return its n samples with new ids. Raises the errors of add_request.

        This may run during a step. In the engine it changes only the next id and the grammar compiler, which no step
        uses.
        """
        prompt = list(prompt_ids)
        limit = self._length_limit(prompt, params)
        stop_ids = frozenset(params.stop_token_ids)
        for token in stop_ids:
            if token >= self.model.vocab_size:
                raise RequestError(f"stop_token_ids holds {token}; the vocabulary has {self.model.vocab_size} ids")
        for token in params.logit_bias or ():
            if token >= self.model.vocab_size:
                raise RequestError(f"logit_bias holds token {token}; the vocabulary has {self.model.vocab_size} ids")
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        self.limits.check(params, self.defaults, eos_ids | stop_ids)
        base_seed = sample_seed(self.seed, self._next_id + 1) if params.seed is None else params.seed
        guides: Sequence[Guide | None] = [None] * params.n
        if params.structured_outputs is not None:
            guides = self._grammars().guides(params.structured_outputs, eos_ids | stop_ids, params.n)
        samples = []
        for index in range(params.n):
            sampling = RequestSampling.of(
                params, sample_seed(base_seed, index), len(prompt), eos_ids | stop_ids, self.defaults
            )
            samples.append(
                Request(
                    request_id=self._next_id + index,
                    tokens=list(prompt),
                    prompt_len=len(prompt),
                    sampling=sampling,
                    length_limit=limit,
                    min_tokens=params.min_tokens,
                    eos_ids=eos_ids,
                    stop_token_ids=stop_ids,
                    include_stop=params.include_stop_str_in_output,
                    text=self._text_stream(params, prompt),
                    max_draft_len=sys.maxsize if params.max_draft_len is None else params.max_draft_len,
                    speculates=params.max_draft_len != 0,
                    logprobs=None if params.logprobs is None else LogprobRecord(params.logprobs, self.tokenizer),
                    guide=guides[index],
                    reuses_prefix=self.loop.collector is None,
                )
            )
        self._next_id += params.n
        return samples

    def queue(self, samples: list[Request]) -> None:
        """Queue the samples of one prompt, made by make_request. They run from the next step on."""
        self._requests.update((sample.request_id, sample) for sample in samples)
        self.loop.scheduler.add(samples[0], samples[1:])
        self.stats.prompt_tokens += samples[0].prompt_len

    def step(self) -> list[Emission]:
        """Run one step of the loop, and return which samples got which tokens. The engine drops finished samples."""
        start = time.perf_counter()
        emissions = self.loop.step()
        self.stats.steps += 1
        self.stats.step_time += time.perf_counter() - start
        self.stats.preemptions = self.loop.scheduler.num_preemptions
        self.stats.prefix_query_tokens = self.loop.scheduler.prefix_query_tokens
        self.stats.prefix_hit_tokens = self.loop.scheduler.prefix_hit_tokens
        self.stats.drafter_failures = self.loop.proposer.num_failures
        self.stats.stale_drafts = self.loop.proposer.num_stale
        self.stats.launch_time = sum([executable.seconds for executable in self.executables])
        for emission in emissions:
            self.stats.output_tokens += len(emission.tokens)
            if emission.finished:
                self._count(emission.request)
        self._count_saved()
        if self.log is not None:
            self.log.observe(emissions)
        if self.debug or not (self.has_work or self.loop.scheduler.allocator.is_whole):
            self.check()
        return emissions

    def flush(self) -> None:
        """Write all hidden states that wait to be written. EngineError if they cannot be written."""
        if self.loop.collector is not None:
            try:
                self.loop.collector.flush()
            finally:
                self._count_saved()

    def close(self) -> None:
        """Flush, then release all resources; the engine cannot be used afterwards. Raises the errors of flush."""
        try:
            if self.loop.collector is not None:
                self.loop.collector.close()
        finally:
            self.on_close()

    def abort(self, request_id: int, error: Exception | None = None) -> Emission | None:
        """End one sample now, as its caller asked (finish_reason "abort") or with an error.

        Its blocks become free at once, or when the step in flight that includes it completes. Return an emission with
        the text that was still held back. None: the id is unknown or has finished, and is ignored.
        """
        request = self._requests.get(request_id)
        if request is None or request.finished:
            return None
        self.loop.settle()
        shown, context = len(request.shown_text), request.is_context
        if error is None:
            request.abort()
        else:
            request.fail(error)
        if not self.loop.scheduler.drop_sibling(request):
            self.loop.remove(request)
        self._count(request)
        return Emission(request, [], request.shown_text[shown:], 0, 0, context, finished=True)

    def settle(self) -> None:
        """Bring all requests up to date. Call this before you read requests between steps.

        Requests of a steady batch (engine.steady) are not updated in every step. Finished ones are always up to date.
        """
        self.loop.settle()

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def check(self) -> None:
        """Account for every KV block; EngineError if one leaked."""
        try:
            self.loop.scheduler.allocator.check(self.loop.scheduler.live())
        except AssertionError as error:
            raise EngineError(f"KV cache accounting failed: {error}; please report this") from error

    def _count_saved(self) -> None:
        if self.loop.collector is not None:
            writer = self.loop.collector.writer
            self.stats.saved_requests, self.stats.unsaved_requests = writer.num_saved, writer.num_lost
            self.stats.save_error = writer.error

    def _count(self, request: Request) -> None:
        del self._requests[request.request_id]
        reason = request.finish_reason or ""
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        self.stats.speculation = SpeculationStats.total((self.stats.speculation, request.stats))

    def _grammars(self) -> GrammarCompiler:
        """The grammar compiler. RequestError without a tokenizer, DependencyError without xgrammar."""
        if self.tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and this model folder has none")
        if self._compiler is None:
            self._compiler = GrammarCompiler(self.tokenizer, self.model.vocab_size)
        return self._compiler

    def _text_stream(self, params: SamplingParams, prompt: Sequence[int]) -> TextStream | None:
        if self.tokenizer is None or not params.detokenize:
            if params.stop:
                raise RequestError("stop strings need a tokenizer, and this model folder has none; use stop_token_ids")
            return None
        return TextStream(
            self.tokenizer,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            prompt=prompt,
        )

    def _length_limit(self, prompt: list[int], params: SamplingParams) -> int:
        """Largest number of tokens of prompt and output together. Raises if the prompt is unusable or can never fit."""
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.model.vocab_size:
                raise RequestError(f"the prompt holds token id {token!r}; ids are 0..{self.model.vocab_size - 1}")
        if self.max_input_len is not None and len(prompt) > self.max_input_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, max_input_len is {self.max_input_len}; shorten it or raise that"
            )
        if len(prompt) >= self.max_seq_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, which leaves no room in max_seq_len = {self.max_seq_len}; "
                "shorten it or raise max_seq_len"
            )
        limit = self.max_seq_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        capacity = self.loop.scheduler.allocator.capacity
        if limit > capacity:
            raise CapacityError(
                f"prompt and output need KV for {limit} tokens, the cache holds {capacity}; lower max_tokens "
                "or raise kv_cache_memory / num_kv_blocks"
            )
        return limit
