"""The config that all checkpoint folders have, whatever is in them.

A decoder's config has more fields (config/checkpoint/model.py), a draft head's has fewer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.config.checkpoint.eagle_wrapper import unwrapped
from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.config.checkpoint.reader import Reader, read_json
from trtspec.config.checkpoint.speculators import plain_config
from trtspec.errors import CheckpointError, UnsupportedError
from trtspec.hub.folders import checkpoint_folder


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The config of a checkpoint folder.

    model_type: "" if config.json does not say. raw: config.json as read. An EAGLE head's is without its wrapper, and
    one of the speculators package has the field names of other heads. quantization: which weights are quantised
    already.
    """

    path: Path
    model_type: str
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    quantization: CheckpointQuantization | None = None


def read_checkpoint(path: str | os.PathLike[str], role: str) -> CheckpointConfig:
    """Read the config of a folder that need not be a decoder's.

    Raises CheckpointError, and UnsupportedError for a kind of quantised weights.
    """
    read = plain_config(unwrapped(checkpoint_reader(path, role)))
    return CheckpointConfig(
        path=read.file.parent,
        model_type=read.string("model_type", ""),
        raw=read.data,
        quantization=checkpoint_quantization(read),
    )


def architecture_of(checkpoint: CheckpointConfig) -> str:
    """The first of the checkpoint's architectures, "" if config.json names none."""
    names = checkpoint.raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def checkpoint_reader(path: str | os.PathLike[str], role: str) -> Reader:
    """Reader of the folder's config.json. Raises CheckpointError.

    role: "target" or "draft", the name of the model in errors.
    """
    folder = checkpoint_folder(path, role)
    if not folder.is_dir():
        raise CheckpointError(
            f"{role} model {os.fspath(path)!r} is not a folder on this machine; pass the folder of a checkpoint that "
            "was downloaded, a GGUF file or a name on the Hub (owner/model)"
        )
    return Reader(read_json(folder / "config.json", role, required=True), folder / "config.json", role)


def checkpoint_quantization(config: Reader) -> CheckpointQuantization | None:
    """Quantisation of the weights as config.json states it, or hf_quant_config.json next to it."""
    hf_quant_config = config.file.with_name("hf_quant_config.json")
    found = Reader(read_json(hf_quant_config, config.role, required=False), hf_quant_config, config.role)
    return CheckpointQuantization.read(config, found)


def head_reader(config: CheckpointConfig, model_type: str, what: str) -> Reader:
    """Reader of the config.json of a draft head that is no decoder.

    UnsupportedError for a checkpoint of another kind.
    """
    if config.model_type not in ("", model_type):
        raise UnsupportedError(
            f"draft model {config.path}: model_type {config.model_type!r} is no {what}, whose model_type is "
            f"{model_type!r}; set method to what it is, or leave method unset"
        )
    if config.quantization is not None:
        raise UnsupportedError(
            f"draft model {config.path}: {what} of quantised weights ({config.quantization}) is not supported; use the "
            "bf16, fp16 or fp32 one, and quantization in speculative_config"
        )
    return Reader(dict(config.raw), config.path / "config.json", "draft")
