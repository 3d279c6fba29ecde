"""`trtspec`: a row for each command; arguments in, exit status out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trtspec.cli import bench, build, export_config, generate, info, train, triton_repo
from trtspec.cli.options import add_engine_options, speculative_config
from trtspec.errors import TrtSpecError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 an error (one line on stderr), 2 unusable arguments, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="trtspec", description="Speculative decoding for large language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="generate text from prompts")
    add_engine_options(command)
    generate.add_arguments(command)
    command.set_defaults(run=generate.run)

    group = commands.add_parser("bench", help="measure").add_subparsers(dest="what", required=True, metavar="WHAT")
    command = group.add_parser("decode", help="tokens per second, beside plain decoding and the machine's limit")
    add_engine_options(command)
    bench.add_arguments(command)
    command.set_defaults(run=bench.run)
    command = group.add_parser("acceptance", help="acceptance length and acceptance per position for K = 1, 2, ...")
    add_engine_options(command)
    bench.add_acceptance_arguments(command)
    command.set_defaults(run=bench.run_acceptance)

    command = commands.add_parser("info", help="what a model folder is, which speculation it supports, memory it needs")
    info.add_arguments(command)
    command.set_defaults(run=info.run)

    group = commands.add_parser("train", help="make drafts").add_subparsers(dest="what", required=True, metavar="WHAT")
    for kind, what in train.WHAT.items():
        command = group.add_parser(kind, help=f"{what} for a target; a run that was stopped goes on")
        train.add_arguments(command, kind)

    command = commands.add_parser("build", help="compile an engine folder that LLM(folder) starts at once")
    build.add_arguments(command)
    command.set_defaults(run=build.run)

    command = commands.add_parser("verify", help="check that an engine folder is whole and fits this machine")
    build.add_verify_arguments(command)
    command.set_defaults(run=build.run_verify)

    command = commands.add_parser("export-config", help="speculation as settings of TensorRT-LLM or vLLM")
    export_config.add_arguments(command)
    command.set_defaults(run=export_config.run)

    command = commands.add_parser("triton-repo", help="write a model repository for Triton Inference Server")
    add_engine_options(command)
    triton_repo.add_arguments(command)
    command.set_defaults(run=triton_repo.run)

    namespace = parser.parse_args(arguments)
    try:
        if "spec_method" in namespace:
            namespace.speculative_config = speculative_config(namespace)
        return int(namespace.run(namespace))
    except (TrtSpecError, OSError) as error:
        print(f"trtspec: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
