"""`trtspec convert MODEL OUT`: writes a Hugging Face folder of a model that trtspec reads, such as a GGUF file."""

from __future__ import annotations

import argparse
import sys

from trtspec.build.convert import convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: what to convert, and where to."""
    parser.add_argument("model", help="GGUF file, checkpoint folder or name on the Hub")
    parser.add_argument("output", help="the folder to make")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")


def run(namespace: argparse.Namespace) -> int:
    """Write the folder."""
    made = convert(namespace.model, namespace.output, namespace.dtype, lambda what: print(what, file=sys.stderr))
    print(made)
    return 0
