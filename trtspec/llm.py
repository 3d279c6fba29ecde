"""The public entry point: `LLM(model).generate(prompts)`."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from trtspec.build.engine_folder import EngineFolder
from trtspec.build.wiring import create_engine
from trtspec.config.engine import EngineConfig
from trtspec.engine.activity_log import ActivityLog
from trtspec.engine.background import EngineThread, Generation
from trtspec.engine.core import EngineCore
from trtspec.engine.stats import EngineStats
from trtspec.errors import ConfigError, EngineError, RequestError
from trtspec.hub.folders import checkpoint_folder
from trtspec.interop.reading import read_speculative_config
from trtspec.outputs import OutputDelta, RequestOutput
from trtspec.sampling_params import SamplingParams
from trtspec.text import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""One prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


class LLM:
    """A model folder that is ready to generate, with or without speculation.

    model: a Hugging Face checkpoint folder, a GGUF file, a name on the Hub, or an engine folder. A Hub name is
    owner/model; revision is a branch, tag or commit of it. `trtspec build` makes engine folders, which bring their own
    speculation and limits. A checkpoint is compiled at its first start and kept in a cache, unless backend says
    otherwise. TRTSPEC_CACHE is the folder of the cache, or off.
    speculative_config: None, a dict, a SpeculativeConfig or a TensorRT-LLM-style config.
    tokenizer: a folder with one, a tokenizer.json, or a Tokenizer; None = the model's own. Without a tokenizer, prompts
    are token ids and outputs have no text.
    All other arguments are the fields of EngineConfig (dtype, device, max_batch_size, max_num_tokens, max_seq_len,
    kv_cache_memory, num_kv_blocks, seed, ...).

    All methods may be called from any thread, also while others run. All requests share the steps.

    Raises ConfigError, CheckpointError, WeightsError, UnsupportedError or CapacityError.
    """

    def __init__(
        self,
        model: str | Path,
        speculative_config: Any = None,
        tokenizer: str | Path | Tokenizer | None = None,
        *,
        revision: str | None = None,
        progress: bool = False,
        **engine_options: Any,
    ) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(engine_options) - known)
        if unknown:
            raise ConfigError(f"unknown LLM argument {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        folder = checkpoint_folder(model, revision=revision)
        built = EngineFolder.open(folder)
        if built is not None:
            built.check()  # before any of its files is read
        config = EngineConfig(**engine_options) if built is None else built.engine_config(engine_options)
        speculative = read_speculative_config(speculative_config)
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.named(tokenizer) if tokenizer else Tokenizer.from_folder(folder)
        self.tokenizer = tokenizer
        with _spinner(progress) as report:
            # Loading runs in a thread that ends: torch's worker threads of it must not stay next to the engine's.
            loader = ThreadPoolExecutor(1)
            try:
                detail = report if progress else logger.debug
                engine = loader.submit(
                    create_engine, built or folder, speculative, config, tokenizer, report, detail
                ).result()
            finally:
                loader.shutdown(wait=False)  # Ctrl-C does not wait for it
        if not config.disable_log_stats:
            engine.log = ActivityLog(engine.stats, engine.loop.scheduler)
        self._thread: EngineThread | None = EngineThread(engine)

    @property
    def engine(self) -> EngineCore:
        """The engine, for direct use. Waits until all requests in flight have ended. EngineError after shutdown()."""
        thread = self._engine_thread
        thread.join()
        return thread.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one or many prompts. The outputs are in the order of the prompts.

        All prompts are checked before any is run: RequestError or CapacityError names the first bad one. A request that
        fails while it runs fails alone: its finish_reason is "error" and `error` says why.
        sampling_params: one for all, or one per prompt; None = SamplingParams(). use_tqdm: show a progress bar (on a
        terminal).
        """
        many = _as_many(prompts)
        params = _params_for(sampling_params, len(many))
        ids = [self.token_ids(prompt) for prompt in many]
        return self._run(many, ids, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation (a list of {"role", "content"}) or of several.

        It uses the checkpoint's chat template. template_options and chat_template_kwargs are passed to it (tools=...,
        add_generation_prompt=...). RequestError for vLLM's options that are not built.
        """
        for name in ("continue_final_message", "lora_request", "mm_processor_kwargs"):
            if template_options.pop(name, None):
                raise RequestError(f"{name} is not built; leave it out")
        template_options |= chat_template_kwargs or {}
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer with a chat template, and this model folder has none")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = _params_for(sampling_params, len(conversations))
        ids = [self.tokenizer.encode_chat(conversation, **template_options) for conversation in conversations]
        return self._run([{"prompt_token_ids": tokens} for tokens in ids], ids, params, use_tqdm)

    def generate_async(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generation:
        """Start to generate for one prompt and return at once.

        `async for delta in ...` and `for delta in ...` yield an OutputDelta per step and sample; `await ...`,
        `.aresult()` and `.result(timeout)` return the whole RequestOutput. The request runs whether or not it is read.
        Leaving an iteration early, cancelling its task, or `.abort()` ends it. RequestError or CapacityError, at once,
        if it cannot run.
        """
        (params,) = _params_for(sampling_params, 1)
        (generation,) = self._engine_thread.submit([(_text(prompt), self.token_ids(prompt), params)])
        return generation

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Generate for one prompt, and yield the output of each step (text, token ids, number of accepted drafts).

        Leaving the loop early aborts the request.
        """
        yield from self.generate_async(prompt, sampling_params)

    def abort(self, request_id: int) -> None:
        """End a request before the next step: its finish_reason is "abort". Unknown and finished ids are ignored."""
        self._engine_thread.abort(request_id)

    def get_metrics(self) -> EngineStats:
        """Totals since the start: steps, times, tokens, finish reasons, speculation."""
        return self._engine_thread.engine.stats

    @property
    def num_kv_blocks_in_use(self) -> int:
        """Number of KV blocks that requests hold now. Blocks that are only kept for reuse do not count."""
        allocator = self._engine_thread.engine.loop.scheduler.allocator
        return allocator.num_blocks - 1 - allocator.num_free  # without the scratch block

    @property
    def failure(self) -> BaseException | None:
        """Failure of the engine; None: it has not failed.

        After a failure every request ends with EngineError, and a new LLM must be made.
        """
        return self._engine_thread.failure

    def shutdown(self) -> None:
        """Free the model and the cache. Running requests end with EngineError, and so do further calls.

        Raises EngineError if hidden states that were to be written could not be written.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
            thread.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. RequestError for what is no prompt."""
        if isinstance(prompt, Mapping):
            given = {key: value for key, value in prompt.items() if key in ("prompt_token_ids", "prompt") or value}
            given = {key: value for key, value in given.items() if value is not None and key != "type"}
            known = [given.pop(key) for key in ("prompt_token_ids", "prompt") if key in given]
            if not known:
                raise RequestError(
                    f'a prompt dict needs "prompt" or "prompt_token_ids"; this one has {sorted(map(str, prompt))}'
                )
            if given:
                raise RequestError(f"{', '.join(map(str, given))} of a prompt dict: not built; leave it out")
            prompt = known[0]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model folder has no tokenizer.json; pass token ids, or tokenizer=FOLDER")
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence):
            raise RequestError(f"prompt {prompt!r:.80} is no prompt; use text, a list of token ids, or a dict of one")
        return list(cast("Sequence[int]", prompt))

    @property
    def _engine_thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineError("this LLM was shut down; make a new one")
        return self._thread

    def _run(
        self, prompts: Sequence[Prompt], ids: list[list[int]], params: list[SamplingParams], show_progress: bool
    ) -> list[RequestOutput]:
        thread = self._engine_thread
        jobs = zip(map(_text, prompts), ids, params, strict=True)
        generations = thread.submit(jobs, keep_deltas=False)
        try:
            with _batch_bar(len(ids), show_progress, thread.engine.stats) as advance:
                for _ in as_completed([generation.done for generation in generations]):
                    advance()
        except BaseException:  # Ctrl-C: no request of this call goes on
            for generation in generations:
                generation.abort()
            raise
        return [generation.result() for generation in generations]


def _text(prompt: Prompt) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):
        return [prompts]
    many = list(prompts)
    if many and all(isinstance(item, int) for item in many):
        return [cast("list[int]", many)]
    return cast("list[Prompt]", many)


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(f"sampling_params = {params!r:.80} must be SamplingParams(...), or a list of them")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one per prompt")
    return list(params)


@contextmanager
def _spinner(show: bool) -> Iterator[Any]:
    if not show:
        yield lambda message: logger.info("%s", message)
        return
    from trtspec.progress import spinner

    with spinner("loading") as update:
        yield update


@contextmanager
def _batch_bar(total: int, show: bool, stats: EngineStats) -> Iterator[Callable[[], None]]:
    if not show or not sys.stderr.isatty():
        yield lambda: None
        return
    from trtspec.progress import batch_bar

    with batch_bar(total, stats) as advance:
        yield advance
