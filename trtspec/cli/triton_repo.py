"""`trtspec triton-repo`: writes a checkpoint or an engine folder as a model repository of Triton Inference Server."""

from __future__ import annotations

import argparse
from typing import Any

from trtspec.cli.options import engine_options
from trtspec.serve.triton.configs import LAYOUTS
from trtspec.serve.triton.repo import write_repository


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: where to, and in which layout."""
    parser.add_argument("--output-dir", required=True, help="a new folder, or an empty one")
    parser.add_argument(
        "--layout",
        choices=tuple(LAYOUTS),
        default="llmapi",
        help="llmapi: one model, text to text; classic: ensemble, preprocessing, tensorrt_llm, postprocessing and BLS",
    )
    parser.add_argument(
        "--no-streaming",
        action="store_true",
        help="answer each request once, also to infer calls that return one response (which a streaming model refuses)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Write the repository, and print the folders of its models."""
    options: dict[str, Any] = engine_options(namespace)
    for folder in write_repository(
        namespace.output_dir,
        namespace.model,
        namespace.speculative_config,
        namespace.tokenizer,
        layout=namespace.layout,
        streaming=not namespace.no_streaming,
        **options,
    ):
        print(folder)
    return 0
