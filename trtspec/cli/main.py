"""`trtspec`: a table of the commands; arguments in, exit status out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from trtspec.errors import TrtSpecError


class _Command(NamedTuple):
    words: str  # "bench decode"
    home: str  # module of trtspec.cli
    help: str
    takes_engine: bool  # model, speculation and limits are among its options
    add: str = "add_arguments"  # names of its functions there
    run: str = "run"


COMMANDS = (
    _Command("generate", "generate", "generate text from prompts", True),
    _Command("chat", "chat", "a conversation in the terminal", True),
    _Command("serve", "serve", "an OpenAI-compatible server", True),
    _Command("bench decode", "bench", "tokens per second, next to plain decoding and the machine's limit", True),
    _Command(
        "bench acceptance", "bench", "acceptance length and acceptance per position for K = 1, 2, ...", True,
        "add_acceptance_arguments", "run_acceptance",
    ),
    _Command(
        "bench adaptive", "bench", "num_speculative_tokens = auto next to fixed numbers, while the load changes", True,
        "add_adaptive_arguments", "run_adaptive",
    ),
    _Command("bench serve", "bench_serve", "latencies and goodput of an OpenAI-compatible server", False),
    _Command("convert", "convert", "write a Hugging Face folder of a GGUF file, or of another model", False),
    _Command("cache list", "cache", "what is kept: engines compiled for checkpoints, and texts of GGUF files", False),
    _Command("cache prune", "cache", "remove those least recently used, down to a size", False,
        "add_prune_arguments", "run_prune",
    ),
    _Command("cache clear", "cache", "remove all that are not in use", False, "add_arguments", "run_clear"),
    _Command("info", "info", "what a model folder is, which speculation it supports, memory it needs", False),
    _Command("build", "build", "compile an engine folder that LLM(folder) starts at once", False),
    _Command(
        "verify", "build", "check that an engine folder is whole and fits this machine", False,
        "add_verify_arguments", "run_verify",
    ),
    _Command("triton-repo", "triton_repo", "write a model repository for Triton Inference Server", True),
    _Command("export-config", "export_config", "speculation as settings of TensorRT-LLM or vLLM", False),
)  # fmt: skip
GROUPS = {"bench": "measure", "cache": "compiled engines and texts of GGUF files, which are kept"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 done, 1 an error (one line on stderr), 2 unusable arguments, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    namespace = _parser(given).parse_args(given)
    try:
        if "spec_method" in namespace:
            from trtspec.cli.options import speculative_config

            namespace.speculative_config = speculative_config(namespace)
        return int(namespace.run(namespace))
    except (TrtSpecError, OSError) as error:
        print(f"trtspec: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of all commands, with the options of the one that is given.

    The modules of the other commands are not imported, because torch alone takes seconds.
    """
    parser = argparse.ArgumentParser(prog="trtspec", description="Speculative decoding for large language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = {}
    for name, about in GROUPS.items():
        members = commands.add_parser(name, help=about)
        groups[name] = members.add_subparsers(dest="what", required=True, metavar="WHAT")
    for one in COMMANDS:
        *group, word = one.words.split()
        command = (groups[group[0]] if group else commands).add_parser(word, help=one.help)
        if list(given[: len(group) + 1]) == [*group, word]:
            home = import_module(f"trtspec.cli.{one.home}")
            if one.takes_engine:
                from trtspec.cli.options import add_engine_options

                add_engine_options(command)
            getattr(home, one.add)(command)
            command.set_defaults(run=getattr(home, one.run))
    training = commands.add_parser("train", help="make drafts")
    if given[:1] == ["train"]:
        from trtspec.cli import train
        from trtspec.methods.table import METHODS

        heads = training.add_subparsers(dest="what", required=True, metavar="WHAT")
        for kind in train.KINDS:
            what = METHODS[kind].trains
            command = heads.add_parser(kind, help=f"{what} for a target; a run that was stopped goes on")
            train.add_arguments(command, kind)
    return parser
