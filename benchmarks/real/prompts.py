"""The sets of prompts."""

from __future__ import annotations

from examples.smollm2.__main__ import questions
from examples.smollm2.prompts import COMPLETE
from examples.smollm2.sources import human_eval
from trtspec.text import Tokenizer

SETS = ("HumanEval", "chat")


def prompts_of(name: str, tokenizer: Tokenizer, count: int | None = None) -> list[list[int]]:
    """Ids of `count` prompts, spread evenly over one of SETS. None: of all its prompts."""
    texts = [COMPLETE.format(one.prompt.strip("\n")) for one in human_eval()] if name == "HumanEval" else questions()
    if count is not None and count < len(texts):
        texts = [texts[i * len(texts) // count] for i in range(count)]
    return [tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True) for text in texts]


def turns_of(
    name: str, tokenizer: Tokenizer, count: int | None, turns: int, warm_up: int, apart: bool
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Return the prompts of some turns, `count` each, and `warm_up` prompts that run before them.

    apart: no prompt is in two turns, nor in the warm-up. ValueError if the set has too few for that.
    """
    if not apart:
        prompts = prompts_of(name, tokenizer, count)
        return [prompts] * turns, prompts[:warm_up]
    needed = warm_up + turns * (count or 0)
    prompts = prompts_of(name, tokenizer, needed)
    if count is None or len(prompts) < needed:
        most = (len(prompts) - warm_up) // turns
        raise ValueError(f"{turns} turns have prompts of their own, and {name} has {most} for each; lower --prompts")
    rest = prompts[warm_up:]
    return [rest[turn::turns] for turn in range(turns)], prompts[:warm_up]
