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
