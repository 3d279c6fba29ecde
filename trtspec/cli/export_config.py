"""`trtspec export-config`: an engine's speculation, or that of the options, as settings of another server."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trtspec.build.engine_folder import EngineFolder
from trtspec.build.speculation import read_draft
from trtspec.cli.options import add_speculation, speculation
from trtspec.config.speculation_plan import DraftInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError
from trtspec.hub.folders import checkpoint_folder
from trtspec.interop.export import SERVERS, export_settings, settings_text
from trtspec.interop.field_mapper import FieldWarning
from trtspec.methods.table import METHODS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: what to export, for which server, and where to."""
    parser.add_argument("engine", nargs="?", help="engine folder; or else the options below, as trtspec build has them")
    parser.add_argument("--to", required=True, choices=SERVERS, help="whose settings to write")
    add_speculation(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: standard output)")
    parser.add_argument("--replace", action="store_true", help="replace a file that is at --output")
    parser.add_argument("--strict", action="store_true", help="a warning is an error: write nothing, exit status 1")


def run(namespace: argparse.Namespace) -> int:
    """Print warnings to stderr, and write the settings to stdout or to the file."""
    options = speculation(namespace)
    if namespace.engine is not None:
        if options is not None:
            raise ConfigError(f"{namespace.engine} and options of speculation are both given; give one of them")
        config, draft, own = _of_engine(namespace.engine)
    elif options is None:
        raise ConfigError("nothing to export; give an engine folder, --speculative_decoding_mode or --spec")
    else:
        config, draft, own = options, _draft_info(options), []
    settings, warnings = export_settings(config, namespace.to, draft)
    warnings = [*own, *warnings]
    for warning in warnings:
        print(f"trtspec: warning: {warning}", file=sys.stderr)
    if warnings and namespace.strict:
        raise ConfigError(f"--strict: {len(warnings)} of these settings have no equal in {namespace.to}")
    text = settings_text(settings, namespace.to)
    if namespace.output is None:
        sys.stdout.write(text)
    else:
        write_new(namespace.output, text, namespace.replace)
    return 0


def _of_engine(folder: str) -> tuple[SpeculativeConfig, DraftInfo | None, list[FieldWarning]]:
    """Return the engine's speculation with the draft checkpoint that it was built from.

    The engine's own draft is packed for our kernels.
    """
    engine = EngineFolder.open(folder)
    if engine is None:
        raise ConfigError(f"{folder} is no engine folder; give one that trtspec build made, or options of speculation")
    config = engine.speculative_config()
    if config is None:
        raise ConfigError(f"{folder} was built without speculation; there is nothing to export")
    draft = _draft_info(config)
    model = engine.data["speculative_config"].get("model")
    if model == config.model:
        return config, draft, []
    warnings = []
    if not os.path.isdir(model):
        warnings = [FieldWarning("model", model, "the engine was built from this folder, which is not here any more")]
    return config.model_copy(update={"model": model}), draft, warnings


def _draft_info(config: SpeculativeConfig) -> DraftInfo | None:
    """Return what the draft's config.json says, if that matters: which method it is for, which layers it reads."""
    reads_layers = config.method is None or "capture_layers" in METHODS[config.method].takes
    if (
        not reads_layers
        or config.model is None
        or not checkpoint_folder(config.model, "draft", config.revision).is_dir()
    ):
        return None
    return read_draft(config)


def write_new(path: Path, text: str, replace: bool) -> None:
    """Write the whole file or nothing. Raises ConfigError if there is a file already, unless `replace`."""
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; give a file")
    if os.path.lexists(path) and not replace:
        raise ConfigError(f"--output {path} is there already; replace it with --replace, or give another file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
