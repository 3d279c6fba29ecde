"""`trtspec chat`: a conversation in the terminal, with accepted drafts in green and acceptance figures."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import time
from dataclasses import dataclass, field

from rich.console import Console

from trtspec.cli.running import coloured, open_llm
from trtspec.errors import RequestError, TrtSpecError
from trtspec.llm import LLM
from trtspec.outputs import SpeculationStats
from trtspec.sampling_params import SamplingParams
from trtspec.text import IncrementalDetokenizer

HELP = """\
/new    begin another conversation
/retry  answer the last question once more, with other random numbers
/help   this
/exit   leave; so does Ctrl-D
Ctrl-C ends an answer, of which what was said stays. A line that ends with \\ goes on in the next."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the properties of every answer."""
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", help="a system message, with which each conversation begins")
    chat.add_argument("--max-tokens", type=int, help="of an answer (default: what room there is)")
    chat.add_argument("--temperature", type=float, default=0.8, help="0 = greedy (default 0.8)")
    chat.add_argument("--top-k", type=int, help="sample from the k likeliest tokens; 0 = from all")
    chat.add_argument("--top-p", type=float, help="sample from the likeliest tokens with this probability together")
    chat.add_argument("--min-p", type=float, help="sample from tokens with this share of the largest probability")
    chat.add_argument("--seed", type=int, help="of the first answer; the others count up (default: drawn anew)")


@dataclass
class Conversation:
    """A list of messages so far. Each message of the user has its answer, except one that is being answered."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: int = 0  # begun so far, in all conversations

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin another conversation."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def take_back(self) -> str | None:
        """Remove the last question with its answer, and return the question; None if there is none."""
        while self.messages and self.messages[-1]["role"] != "system":
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None


def run(namespace: argparse.Namespace) -> int:
    """Answer until the input ends. Return 1 if the input is no terminal and an answer failed, else 0."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines and remembers them

    _params(namespace, 0)  # raises for wrong parameters before the model starts
    interactive, console, failed = sys.stdin.isatty(), Console(), False
    with open_llm(namespace, seed=secrets.randbits(32)) as llm:  # of answers, unless --seed is given
        if llm.tokenizer is None or not llm.tokenizer.chat_templates:
            raise RequestError(f"{namespace.model} has no chat template; use trtspec generate, or give --tokenizer")
        if interactive:
            console.print("/help lists the commands", style="dim", highlight=False)
        chat = Conversation(namespace.system)
        while (question := _next(chat, console, interactive)) is not None:
            try:
                answer(llm, chat, question, _params(namespace, chat.answers), console)
            except TrtSpecError as error:  # the conversation is as before
                failed = True
                print(f"trtspec: {error}", file=sys.stderr, flush=True)
            except KeyboardInterrupt:  # before or after the answer itself; the conversation is complete
                if not interactive:
                    raise
                console.print()
    return 1 if failed and not interactive else 0


def answer(llm: LLM, chat: Conversation, question: str, params: SamplingParams, console: Console) -> None:
    """Print the answer as it comes, and add question and answer to the conversation.

    Ctrl-C keeps the part of the answer that was printed until then. RequestError or EngineError if there is no answer;
    the conversation is then as before.
    """
    assert llm.tokenizer is not None
    messages = [*chat.messages, {"role": "user", "content": question}]
    ids = llm.tokenizer.encode_chat(messages)
    detokenizer = IncrementalDetokenizer(llm.tokenizer, params.skip_special_tokens, ids)
    said, error, stopped, num_tokens = "", None, False, 0
    chat.answers += 1
    begin = time.perf_counter()
    generation = llm.generate_async(ids, params)
    try:
        for delta in generation:
            line = coloured(delta, detokenizer)
            said += line.plain
            console.print(line, end="", soft_wrap=True, highlight=False)
            num_tokens += len(delta.token_ids)
            error = delta.error or error
    except KeyboardInterrupt:
        stopped = True
    rest = detokenizer.flush()
    said += rest
    console.print(rest, end="" if said.endswith("\n") else "\n", soft_wrap=True, highlight=False, markup=False)
    seconds = time.perf_counter() - begin
    if said and error is None:
        chat.messages = [*messages, {"role": "assistant", "content": said}]
    if console.is_terminal:
        parts = ["stopped"] * stopped + _worth(num_tokens, seconds, generation.speculation)
        console.print(" · ".join(parts), style="dim", highlight=False, soft_wrap=True)
    if error is not None:
        raise RequestError(error)


def _worth(num_tokens: int, seconds: float, stats: SpeculationStats) -> list[str]:
    parts = [f"{num_tokens} tokens", f"{num_tokens / seconds:.0f} tok/s"]
    if stats.num_drafts:
        shares = " ".join(f"{100 * share:.0f}" for share in stats.acceptance_per_position)
        parts += [f"{stats.tokens_per_step:.2f} tokens per step", f"drafts accepted {shares} %"]
    return parts


def _next(chat: Conversation, console: Console, interactive: bool) -> str | None:
    """Return the next question; None at the end. Run the commands that come before it."""
    while True:
        try:
            line = _read(interactive)
        except EOFError:
            if interactive:
                console.print()
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            console.print()
            continue
        word = line.strip()
        if not word:
            continue
        if not interactive or not word.startswith("/") or not word[1:].isalpha():
            return line
        if word == "/exit":
            return None
        if word == "/new":
            chat.clear()
            console.print("a new conversation", style="dim")
        elif word == "/retry":
            question = chat.take_back()
            if question is not None:
                return question
            console.print("nothing was asked yet", style="dim")
        else:
            console.print(HELP, style="dim", highlight=False, markup=False)


def _read(interactive: bool) -> str:
    """Read a line, with the lines that continue it."""
    lines = [input("> " if interactive else "")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("  " if interactive else ""))
    return "\n".join(lines)


def _params(namespace: argparse.Namespace, number: int) -> SamplingParams:
    return SamplingParams(
        temperature=namespace.temperature,
        top_k=namespace.top_k,
        top_p=namespace.top_p,
        min_p=namespace.min_p,
        seed=None if namespace.seed is None else namespace.seed + number,
        max_tokens=namespace.max_tokens,
    )
