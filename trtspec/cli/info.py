"""`trtspec info MODEL`: the properties of a checkpoint folder, before anything is loaded."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from trtspec.build.cache import Cache
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import TrtSpecError
from trtspec.hub.folders import checkpoint_folder
from trtspec.hub.kept import FOLDER_VARIABLE
from trtspec.methods.table import METHODS
from trtspec.models.specs import decoder_spec
from trtspec.models.weights import DTYPES, checkpoint_bytes, loaded_bytes
from trtspec.text import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the model folder, and the sequence length for the memory figures."""
    parser.add_argument("model", help="checkpoint folder, GGUF file or name on the Hub")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the Hub")
    parser.add_argument("--max-seq-len", type=int, help="sequence length for the memory figures; default: the model's")


def run(namespace: argparse.Namespace) -> int:
    """Print the table."""
    model = ModelConfig.from_folder(checkpoint_folder(namespace.model, revision=namespace.revision))
    spec = decoder_spec(model)
    tokenizer = Tokenizer.from_folder(model.path)
    length = namespace.max_seq_len or model.max_seq_len
    kv_bytes = spec.kv_elements_per_token * DTYPES[model.dtype].itemsize

    table = Table(show_header=False, box=None)
    table.add_row("architecture", f"{model.architecture} ({model.model_type})")
    table.add_row("parameters", f"{spec.num_parameters / 1e6:.1f} M, {model.dtype}")
    if model.quantization is not None:
        table.add_row("quantised", str(model.quantization))
    table.add_row("layers", f"{spec.num_layers} x hidden {spec.hidden_size}, intermediate {spec.intermediate_size}")
    table.add_row("heads", f"{spec.num_heads} query, {spec.num_kv_heads} key/value, head size {spec.head_dim}")
    table.add_row("context", f"{model.max_seq_len} tokens, rope {model.rope.rope_type}{_windows(spec.windows)}")
    table.add_row("vocabulary", f"{model.vocab_size}, {'tied' if spec.tie_word_embeddings else 'separate'} head")
    table.add_row("tokenizer", _tokenizer(tokenizer))
    table.add_row("end of sequence", ", ".join(map(str, sorted(model.eos_token_ids))) or "none in config.json")
    table.add_row("weights", f"{checkpoint_bytes(model.path, 'target') / 1e6:.1f} MB on disk")
    table.add_row("KV cache", f"{kv_bytes} bytes per token, {kv_bytes * length / 1e6:.1f} MB for {length} tokens")
    needed = loaded_bytes(model) + kv_bytes * length
    table.add_row("memory, one sequence", f"{needed / 1e6:.1f} MB: weights and the KV of {length} tokens")
    for method, words in speculation_support(model):
        table.add_row(f"speculation: {method}", words)
    cache = Cache.of_environment()
    table.add_row("compiled engines", f"{FOLDER_VARIABLE}=off: none are kept" if cache is None else str(cache.folder))
    Console().print(table)
    return 0


def speculation_support(model: ModelConfig) -> list[tuple[str, str]]:
    """Return (method, what it needs or why it is not available) for every method."""
    rows = []
    for name, row in sorted(METHODS.items()):
        try:
            if row.of_target and row.checkpoint is not None:
                row.checkpoint.open()(model, SpeculativeConfig(method=name))
            rows.append((name, f"yes, needs {row.needs}"))
        except TrtSpecError as error:
            rows.append((name, f"no: {error}"))
    return rows


def _windows(windows: tuple[int | None, ...]) -> str:
    sliding = [window for window in windows if window is not None]
    return f", sliding window {sliding[0]} in {len(sliding)} of {len(windows)} layers" if sliding else ""


def _tokenizer(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "none: prompts are token ids"
    return f"{tokenizer.vocab_size} tokens, {'with' if tokenizer.chat_templates else 'no'} chat template"
