"""`trtspec build` and `trtspec verify`: engine folders. The option names are those of trtllm-build."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console

from trtspec.backends.compiled import CompiledStep
from trtspec.backends.table import COMPILERS, USUAL_COMPILER
from trtspec.build.build import build_engine, refuse_taken
from trtspec.build.engine_folder import EngineFolder
from trtspec.build.plan import plan_build
from trtspec.cli.options import LIMITS, add_model, add_speculation, speculation
from trtspec.cli.show_plan import show_plan
from trtspec.cli.tensorrt_options import add_tensorrt, cache_limits, tensorrt_options
from trtspec.config.engine import EngineConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.hub.folders import checkpoint_folder
from trtspec.ops import load_plugins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: what to build from, for which speculation and limits, and where to."""
    add_model(parser, "--checkpoint_dir", "of the target: checkpoint folder, GGUF file or name on the Hub")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the Hub")
    parser.add_argument("--output_dir", required=True, help="the engine folder to make")
    parser.add_argument("--backend", default=USUAL_COMPILER, help=f"{', '.join(COMPILERS)} (default {USUAL_COMPILER})")
    add_speculation(parser)
    for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "block_size"):
        parser.add_argument(f"--{name}", type=int, help=LIMITS[name])
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--quantization", help="int8, int4, int4_g64 or int4_g128 (default: none)")
    parser.add_argument("--lm_head_quantization", help="int8: of the lm_head, and the embedding if they are one matrix")
    parser.add_argument("--kv_dtype", default="auto", help="auto: that of the model")
    parser.add_argument(
        "--dry_run", action="store_true", help="show graphs, inputs and memory, from config.json files; compile nothing"
    )
    parser.add_argument("--json", metavar="FILE", help="with --dry_run: write what it shows, sizes in bytes")
    parser.add_argument("--replace", action="store_true", help="replace an engine that is at --output_dir")
    add_tensorrt(parser)


def run(namespace: argparse.Namespace) -> int:
    """Build, or show what would be built."""
    if namespace.backend not in COMPILERS:
        raise UnsupportedError(f"--backend {namespace.backend}: built: {', '.join(COMPILERS)}")
    if namespace.kv_dtype != "auto":
        raise UnsupportedError(f"--kv_dtype {namespace.kv_dtype} is not built; KV is kept in the model's dtype (auto)")
    if namespace.json is not None and not namespace.dry_run:
        raise ConfigError(f"--json {namespace.json} is for the plan that --dry_run makes; give both, or leave it out")
    options = tensorrt_options(namespace)
    names = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "block_size")
    limits = {name: getattr(namespace, name) for name in names if getattr(namespace, name) is not None}
    limits |= cache_limits(namespace)
    config = EngineConfig(
        backend=namespace.backend,
        dtype=namespace.dtype,
        quantization=namespace.quantization,
        lm_head_quantization=namespace.lm_head_quantization,
        **limits,
    )
    speculative = speculation(namespace)
    console = Console()
    start = time.perf_counter()

    def report(what: str) -> None:
        console.print(f"[dim]{time.perf_counter() - start:6.1f} s[/]  {what}", highlight=False)

    output = Path(namespace.output_dir)
    checkpoint = checkpoint_folder(namespace.checkpoint_dir, revision=namespace.revision)
    refuse_taken(output, namespace.replace)
    if namespace.dry_run:
        plan = plan_build(checkpoint, speculative, config, report, options)
        show_plan(plan, console)
        if namespace.json is not None:
            Path(namespace.json).write_text(json.dumps(plan.to_dict(), indent=1) + "\n", encoding="utf-8")
        return 0
    engine = build_engine(
        checkpoint,
        output,
        speculative,
        config,
        replace_existing=namespace.replace,
        report=report,
        options=options,
    )
    size = sum(facts["size"] for facts in engine.data["files"].values())
    report(f"built {output}, {size / 1e6:.1f} MB")
    return 0


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument: the engine folder."""
    parser.add_argument("engine", help="engine folder")


def run_verify(namespace: argparse.Namespace) -> int:
    """Hash every file, and find what runs the engine."""
    engine = EngineFolder.open(namespace.engine)
    if engine is None:
        raise ConfigError(f"{namespace.engine} is no engine folder; build one with trtspec build")
    engine.verify()
    executable = COMPILERS[engine.backend].load_executable()
    load_plugins()
    for compiled in engine.data["executables"].values():
        executable.check(CompiledStep.from_dict(compiled))
    Console().print(f"{namespace.engine}: {len(engine.data['files'])} files are as built, and it can run here")
    return 0
