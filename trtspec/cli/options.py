"""Options that several commands share: the model, its speculation, the engine's limits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trtspec.config.speculative import AUTO_DRAFT_LEN, SpeculativeConfig
from trtspec.errors import ConfigError
from trtspec.interop.reading import read_speculative_config
from trtspec.modes import SpeculativeDecodingMode, select_mode, words_for

LIMITS = {
    "max_batch_size": "requests in one step (default 32)",
    "max_num_tokens": "rows of one step of the target (default 2048)",
    "max_seq_len": "tokens of a sequence (default: the checkpoint's limit)",
    "max_input_len": "tokens of a prompt (default: no limit of its own)",
    "num_kv_blocks": "size of the KV cache in blocks (default: for max-batch-size full sequences, if memory allows)",
    "kv_cache_memory": "the same in bytes, for target and draft together",
    "block_size": "tokens of a KV block (default 16)",
}
"""Field of EngineConfig -> help of its option."""


_TENSORRT_LLM = {"method": "decoding_type", "model": "speculative_model", "num_speculative_tokens": "max_draft_len"}


def add_model(parser: argparse.ArgumentParser, option: str, help: str) -> None:
    """Add an argument for a folder, given either by its position or by `option`.

    The namespace has it under the option's name, as a str.
    """
    either = parser.add_mutually_exclusive_group(required=True)
    name = option.lstrip("-")
    either.add_argument(name, nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=help)
    either.add_argument(option, dest=name, metavar="MODEL", help="the same")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add model, speculation and limits, as every command that runs an engine takes them."""
    add_model(parser, "--model", "checkpoint or engine folder, GGUF file or name on the Hub")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the Hub")
    parser.add_argument("--tokenizer", help="folder or tokenizer.json, if not the model's own")
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument("--spec-method", help="ngram, draft_model, ... (default: by --spec-model)")
    speculation.add_argument("--spec-model", help="of the draft: checkpoint folder, GGUF file or name on the Hub")
    speculation.add_argument(
        "--spec-tokens", type=_draft_len, metavar="K", help="draft tokens per step; auto: as many as save time"
    )
    speculation.add_argument("--spec", help="all of it: a JSON object, or a file that holds one")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--backend", help="of a checkpoint: auto (default: compiled once, then kept), eager (op by op), cuda (a GPU)"
    )
    engine.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    engine.add_argument("--quantization", help="int8, int4, int4_g64 or int4_g128")
    engine.add_argument("--lm-head-quantization", help="int8: of the lm_head, and the embedding if they are one matrix")
    for name, what in LIMITS.items():
        engine.add_argument(f"--{name.replace('_', '-')}", type=int, help=what)
    engine.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction,
        help="prompts take over the KV blocks of earlier requests that begin alike (default: they do)",
    )  # fmt: skip
    engine.add_argument(
        "--generation-config", choices=("auto", "off"), help="off: unset sampling fields ignore generation_config.json"
    )
    engine.add_argument("--disable-overlap-scheduler", action="store_true", help="wait for every step (cuda)")
    engine.add_argument(
        "--enable-cuda-graph", action=argparse.BooleanOptionalAction,
        help="generation steps are CUDA graphs (cuda; default: they are)",
    )  # fmt: skip


def engine_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the LLM keyword arguments that were given."""
    names = (
        "revision",
        "backend",
        "dtype",
        "quantization",
        "lm_head_quantization",
        *LIMITS,
        "enable_prefix_caching",
        "generation_config",
        "enable_cuda_graph",
    )
    options = {name: getattr(namespace, name) for name in names if getattr(namespace, name) is not None}
    if namespace.disable_overlap_scheduler:
        options["disable_overlap_scheduler"] = True
    return options


def _draft_len(text: str) -> int | str:
    if text == AUTO_DRAFT_LEN:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO_DRAFT_LEN!r}") from None


def speculative_config(namespace: argparse.Namespace) -> dict[str, Any] | None:
    """Return the speculative_config that the --spec options describe; None if there are none."""
    fields = {
        "method": namespace.spec_method,
        "model": namespace.spec_model,
        "num_speculative_tokens": namespace.spec_tokens,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if namespace.spec is None:
        return fields or None
    text = namespace.spec
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--spec {namespace.spec!r:.200} is neither a JSON object nor a file with one ({error})"
        ) from error
    if not isinstance(whole, dict):
        raise ConfigError(f"--spec {namespace.spec!r} holds a {type(whole).__name__}; give a JSON object")
    if "decoding_type" in whole:
        fields = {_TENSORRT_LLM[name]: value for name, value in fields.items()}
        if "speculative_model" in fields and "speculative_model_dir" in whole:  # the same field
            whole["speculative_model"] = whole.pop("speculative_model_dir")
    twice = sorted(set(whole) & set(fields))
    if twice:
        raise ConfigError(f"{', '.join(twice)} given in --spec and as an option of its own; give it once")
    return {**whole, **fields}


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Add the speculation options under the names of trtllm-build."""
    parser.add_argument("--speculative_decoding_mode", help="EAGLE3_ONE_MODEL, DRAFT_TARGET, NGRAM, ... (default none)")
    parser.add_argument("--speculative_model_dir", help="checkpoint folder of the draft")
    parser.add_argument("--max_draft_len", type=_draft_len, help="draft tokens per step, K; unset = auto")
    parser.add_argument("--spec", help="all of speculation: a JSON object, or a file that holds one")


def speculation(namespace: argparse.Namespace) -> SpeculativeConfig | None:
    """Return the speculation that the options of `add_speculation` describe; None if there are none.

    The options are the mode's name, the draft and K; or --spec holds all of them. ConfigError if they contradict.
    """
    name = namespace.speculative_decoding_mode
    mode = SpeculativeDecodingMode.from_string(name)
    fields: dict[str, Any] = dict(words_for(mode))
    namespace.spec_method = fields.get("method")
    namespace.spec_model = namespace.speculative_model_dir
    namespace.spec_tokens = namespace.max_draft_len
    whole = speculative_config(namespace)
    if whole is None:
        return None
    if name is not None and mode is SpeculativeDecodingMode.NONE:
        raise ConfigError(
            f"--speculative_decoding_mode {name} excludes --speculative_model_dir, --max_draft_len and --spec; leave "
            "it or them out"
        )
    config = read_speculative_config({**fields, **whole})
    assert config is not None
    if name is not None:
        found = select_mode(config.method, config.one_engine, config.vanilla, config.parallel_drafting)
        if found is not mode:
            raise ConfigError(
                f"--speculative_decoding_mode {name} with --spec {namespace.spec!r} is mode {found.name}; leave out "
                "one, or make them agree"
            )
    return config
