"""`trtspec serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields

from trtspec.cli.options import engine_options
from trtspec.errors import DependencyError
from trtspec.serve.logs import FORMATS, LEVELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: where to listen, for which clients, within which limits."""
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 = all of this machine's")
    server.add_argument("--port", type=int, default=8000, help="0 = any that is free")
    server.add_argument("--served-name", help="what clients call the model (default: the folder's name)")
    server.add_argument(
        "--api-key", action="append", default=[], help="may be given more than once; or TRTSPEC_API_KEY"
    )
    server.add_argument("--max-queue", type=int, default=256, help="samples that may wait; then 429")
    server.add_argument("--max-body", type=int, default=8 << 20, help="bytes of a request")
    server.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for a request that names none, and at most"
    )
    server.add_argument(
        "--client-timeout", type=float, default=60.0, help="seconds to send a body, and to take 64 KiB of an answer"
    )
    server.add_argument(
        "--engine-timeout", type=float, default=300.0,
        help="seconds without a word from an engine that has work; then another is started",
    )  # fmt: skip
    server.add_argument("--drain", type=float, default=30.0, help="seconds for what is in flight when told to stop")
    server.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN", help="browsers' pages that may call it"
    )
    server.add_argument("--seed", type=int, help="seed of requests that bring none (default 0)")
    server.add_argument("--log-format", choices=FORMATS, default="text", help="of the lines on stderr")
    server.add_argument("--log-level", choices=LEVELS, default="info", help="the least that is written")
    server.add_argument(
        "--disable-log-stats", action="store_true", help="no line of acceptance and throughput every 10 seconds"
    )


def run(namespace: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status."""
    try:
        from trtspec.serve.server import serve
        from trtspec.serve.settings import ServeSettings
    except ImportError as error:
        raise DependencyError(f"the server needs {error.name}; pip install 'trtspec[serve]'") from error
    names = {field.name for field in fields(ServeSettings)}
    given = {name: value for name, value in vars(namespace).items() if name in names}
    keys = [*namespace.api_key, *(os.environ[name] for name in ["TRTSPEC_API_KEY"] if name in os.environ)]
    settings = ServeSettings(**{**given, "cors": tuple(namespace.cors)}, api_keys=tuple(keys))
    options = {"model": namespace.model, **engine_options(namespace)}
    if namespace.seed is not None:
        options["seed"] = namespace.seed
    if namespace.tokenizer is not None:
        options["tokenizer"] = namespace.tokenizer
    if namespace.speculative_config is not None:
        options["speculative_config"] = namespace.speculative_config
    return serve(settings, options)
