"""Common parts of commands that generate: the engine that the options name, and tokens in colour."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.text import Text

from trtspec.cli.options import engine_options
from trtspec.llm import LLM
from trtspec.outputs import OutputDelta
from trtspec.text import IncrementalDetokenizer


def open_llm(namespace: argparse.Namespace, **more: Any) -> LLM:
    """Load the model that the options of `add_engine_options` name, with their speculation. Raises what LLM raises.

    more: further arguments of LLM.
    """
    return LLM(
        namespace.model,
        namespace.speculative_config,
        namespace.tokenizer,
        progress=sys.stderr.isatty(),
        **engine_options(namespace),
        **more,
    )


def coloured(delta: OutputDelta, detokenizer: IncrementalDetokenizer) -> Text:
    """Return the text of a step's tokens, accepted drafts in green.

    An incomplete character stays in `detokenizer`.
    """
    line = Text()
    for position, token in enumerate(delta.token_ids):
        line.append(detokenizer.push((token,)), "green" if position < delta.num_accepted_drafts else "")
    return line
