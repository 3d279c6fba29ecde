"""The public face: `LLM(model).generate(prompts)`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.engine.assemble import assemble_engine
from trtspec.engine.core import EngineCore
from trtspec.engine.request import Request
from trtspec.engine.stats import EngineStats
from trtspec.engine.step import Emission
from trtspec.errors import ConfigError, EngineError, RequestError
from trtspec.outputs import CompletionOutput, RequestOutput
from trtspec.sampling_params import SamplingParams
from trtspec.text import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


class LLM:
    """A model folder ready to generate, with or without speculation.

    model: a Hugging Face checkpoint folder. speculative_config: None, a dict, a SpeculativeConfig or a
    TensorRT-LLM-style config. tokenizer: a folder to take it from, or a Tokenizer; None = the model's own, and without
    one prompts are token ids and outputs have no text. All other arguments are the fields of EngineConfig (dtype,
    device, max_batch_size, max_num_tokens, max_seq_len, kv_cache_memory, num_kv_blocks, seed, ...).

    Raises ConfigError, CheckpointError, WeightsError, UnsupportedError or CapacityError.
    """

    def __init__(
        self,
        model: str | Path,
        speculative_config: Any = None,
        tokenizer: str | Path | Tokenizer | None = None,
        *,
        progress: bool = False,
        **engine_options: Any,
    ) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(engine_options) - known)
        if unknown:
            raise ConfigError(f"unknown LLM argument {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        config = EngineConfig(**engine_options)
        speculative = SpeculativeConfig.from_any(speculative_config)
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.from_folder(model if tokenizer is None else tokenizer)
        self.tokenizer = tokenizer
        with _spinner(progress) as report:
            self._engine: EngineCore | None = assemble_engine(Path(model), speculative, config, tokenizer, report)

    @property
    def engine(self) -> EngineCore:
        """The running engine. EngineError after shutdown()."""
        if self._engine is None:
            raise EngineError("this LLM was shut down; make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one or many prompts; outputs in the order of the prompts.

        sampling_params: one for all, or one per prompt; None = SamplingParams(). use_tqdm: show a progress bar (on a
        terminal). All prompts are checked before any is run: RequestError or CapacityError names the first bad one.
        What fails while running fails alone: its finish_reason is "error" and `error` says why.
        """
        many = _as_many(prompts)
        params = _params_for(sampling_params, len(many))
        ids = [self._token_ids(prompt) for prompt in many]
        return self._run(many, ids, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation (a list of {"role", "content"}) or of several.

        Uses the checkpoint's chat template; template_options reach it (tools=..., add_generation_prompt=...).
        """
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer with a chat template, and this model folder has none")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = _params_for(sampling_params, len(conversations))
        ids = [self.tokenizer.encode_chat(conversation, **template_options) for conversation in conversations]
        return self._run([{"prompt_token_ids": tokens} for tokens in ids], ids, params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Emission]:
        """Generate for one prompt, yielding what each step emits (token ids, text, how many were accepted drafts).

        Leaving the loop early aborts the request. One call at a time: do not generate() while a stream is open.
        """
        engine = self.engine
        samples = engine.add_request(self._token_ids(prompt), sampling_params or SamplingParams())
        try:
            while any(not sample.finished for sample in samples):
                yield from (emission for emission in engine.step() if emission.request in samples and emission.tokens)
        finally:
            for sample in samples:
                engine.abort(sample.request_id)

    def get_metrics(self) -> EngineStats:
        """Totals since the start: steps, times, tokens, finish reasons, speculation."""
        return self.engine.stats

    def shutdown(self) -> None:
        """Free the model and the cache. Further calls raise EngineError."""
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Mapping):
            if set(prompt) == {"prompt"}:
                prompt = prompt["prompt"]
            elif "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
            else:
                raise RequestError(
                    f'a prompt dict needs "prompt" or "prompt_token_ids"; this one has {sorted(map(str, prompt))}'
                )
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model folder has no tokenizer.json; pass token ids, or tokenizer=FOLDER")
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence):
            raise RequestError(f"prompt {prompt!r:.80} is no prompt; use text, a list of token ids, or a dict of one")
        return list(cast("Sequence[int]", prompt))

    def _run(
        self, prompts: Sequence[Prompt], ids: list[list[int]], params: list[SamplingParams], show_progress: bool
    ) -> list[RequestOutput]:
        engine = self.engine
        groups: list[list[Request]] = []
        try:
            for tokens, one in zip(ids, params, strict=True):
                groups.append(engine.add_request(tokens, one))
            with _batch_bar(len(ids), show_progress) as advance:
                unfinished = [len(group) for group in groups]
                group_of = {sample.request_id: g for g, group in enumerate(groups) for sample in group}
                while engine.has_work:
                    ended = [emission.request.request_id for emission in engine.step() if emission.request.finished]
                    mine = [group_of[request_id] for request_id in ended if request_id in group_of]
                    for g in mine:
                        unfinished[g] -= 1
                    advance(sum(unfinished[g] == 0 for g in set(mine)), engine.stats)
        except BaseException:  # a bad prompt or Ctrl-C: nothing of this call stays behind
            for sample in (sample for group in groups for sample in group):
                engine.abort(sample.request_id)
            raise
        return [
            request_output(prompt, tokens, group) for prompt, tokens, group in zip(prompts, ids, groups, strict=True)
        ]


def request_output(prompt: Prompt, ids: list[int], samples: Sequence[Request]) -> RequestOutput:
    """The public view of one prompt's samples."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return RequestOutput(
        request_id=samples[0].request_id,
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=ids,
        outputs=[
            CompletionOutput(
                index=index,
                text=sample.shown_text,
                token_ids=sample.output_ids,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                seed=None if sample.sampling.greedy else sample.sampling.seed,
                speculation=sample.stats,
                error=None if sample.error is None else f"{type(sample.error).__name__}: {sample.error}",
            )
            for index, sample in enumerate(samples)
        ],
        finished=all(sample.finished for sample in samples),
    )


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
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one per prompt")
    return list(params)


@contextmanager
def _spinner(show: bool) -> Iterator[Any]:
    if not show:
        yield lambda message: logger.info("%s", message)
        return
    with Console(stderr=True).status("loading") as status:
        yield status.update


@contextmanager
def _batch_bar(total: int, show: bool) -> Iterator[Any]:
    console = Console(stderr=True)
    if not show or not console.is_terminal:
        yield lambda finished, stats: None
        return
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, note="")

        def advance(finished: int, stats: EngineStats) -> None:
            speed = stats.output_tokens / stats.step_time if stats.step_time else 0.0
            bar.update(task, advance=finished, note=f"{speed:.0f} tok/s, {stats.steps} steps")

        yield advance
