"""`trtspec generate`: prompts in, text out; one prompt with --show-drafts streams."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from trtspec.cli.running import coloured, open_llm
from trtspec.errors import RequestError
from trtspec.llm import LLM, Prompt
from trtspec.outputs import RequestOutput, or_none
from trtspec.sampling_params import SamplingParams
from trtspec.text import IncrementalDetokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: prompts, sampling, output."""
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", default=[], help="text; may be given more than once")
    prompts.add_argument("--prompt-file", help="a text file: the whole of it is one prompt")
    prompts.add_argument("--prompt-ids", help="token ids, separated by commas")
    prompts.add_argument("--chat", action="store_true", help="wrap each prompt in the checkpoint's chat template")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, help="tokens of a sample, at most (default 128)")
    sampling.add_argument("--min-tokens", type=int, default=0, help="tokens before which no sample ends (default 0)")
    sampling.add_argument("--temperature", type=float, help="0 = greedy")
    sampling.add_argument("--top-k", type=int, help="sample from the k likeliest tokens; 0 = from all")
    sampling.add_argument("--top-p", type=float, help="sample from the likeliest tokens with this probability together")
    sampling.add_argument("--min-p", type=float, help="sample from tokens with this share of the largest probability")
    sampling.add_argument("--seed", type=int, help="of the random numbers (default: the same in every run)")
    sampling.add_argument("--n", type=int, default=1, help="samples per prompt")
    sampling.add_argument("--stop", action="append", default=[], help="stop string; may be given more than once")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end of the text")
    parser.add_argument("--show-drafts", action="store_true", help="colour accepted draft tokens (one prompt)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per sample")


def run(namespace: argparse.Namespace) -> int:
    """Print the generated text; statistics go to stderr. Return 1 if a sample failed, else 0."""
    prompts: list[Prompt] = list(namespace.prompt)
    if namespace.prompt_file:
        prompts.append(_text(namespace.prompt_file))
    if namespace.prompt_ids:
        prompts.append(_ids(namespace.prompt_ids))
    if namespace.show_drafts and namespace.json:
        raise RequestError("--show-drafts colours a text, and --json prints objects; leave one out")
    if not prompts:
        raise RequestError("no prompt; give --prompt, --prompt-file or --prompt-ids")
    params = SamplingParams(
        n=namespace.n,
        temperature=namespace.temperature,
        top_k=namespace.top_k,
        top_p=namespace.top_p,
        min_p=namespace.min_p,
        seed=namespace.seed,
        max_tokens=namespace.max_tokens,
        min_tokens=namespace.min_tokens,
        stop=namespace.stop,
        ignore_eos=namespace.ignore_eos,
    )
    with open_llm(namespace) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        if namespace.show_drafts and llm.tokenizer is not None and len(prompts) == 1 and namespace.n == 1:
            prompt = llm.tokenizer.encode_chat(chats[0]) if namespace.chat else prompts[0]
            stream_coloured(llm, prompt, params, Console())
            return 0
        outputs = llm.chat(chats, params) if namespace.chat else llm.generate(prompts, params)
    for output in outputs:
        _print(output, namespace.json)
    failed = [sample for output in outputs for sample in output.outputs if sample.finish_reason == "error"]
    return 1 if failed else 0


def stream_coloured(llm: LLM, prompt: Prompt, params: SamplingParams, console: Console) -> None:
    """Print one prompt's text as it comes, accepted draft tokens in green. RequestError if the sample fails."""
    assert llm.tokenizer is not None
    before = llm.token_ids(prompt)
    detokenizer = IncrementalDetokenizer(llm.tokenizer, params.skip_special_tokens, before)
    error: str | None = None
    for delta in llm.stream(prompt, params):
        console.print(coloured(delta, detokenizer), end="", soft_wrap=True, highlight=False)
        error = delta.error or error
    console.print(detokenizer.flush(), soft_wrap=True, highlight=False)
    if error is not None:
        raise RequestError(error)


def _print(output: RequestOutput, as_json: bool) -> None:
    for sample in output.outputs:
        if as_json:
            record = {
                "request_id": output.request_id,
                "index": sample.index,
                "text": sample.text,
                "token_ids": list(sample.token_ids),
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "seed": sample.seed,
                "error": sample.error,
                "drafter_error": sample.drafter_error,
                "acceptance_length": or_none(sample.speculation.acceptance_length),
                "tokens_per_step": or_none(sample.speculation.tokens_per_step),
                "acceptance_per_position": sample.speculation.acceptance_per_position,
                "steps": sample.speculation.steps,
            }
            print(json.dumps(record, ensure_ascii=False))
            continue
        print(sample.text or " ".join(map(str, sample.token_ids)))
        if sample.error is not None:
            print(f"trtspec: {sample.error}", file=sys.stderr)
    if not as_json and output.speculation.num_draft_tokens:
        shares = ", ".join(f"{share:.0%}" for share in output.acceptance_per_position)
        note = f"acceptance length {output.acceptance_length:.2f}, per position {shares}, "
        note += f"{output.tokens_per_step:.2f} tokens per step, {output.steps} steps"
        print(note, file=sys.stderr)


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompt-file {file!r} is no text in UTF-8 ({error}); convert it") from error


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(f"--prompt-ids {text!r} are not integers separated by commas") from error
