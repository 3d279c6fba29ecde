"""The Hugging Face folder of a GGUF file: its contents as text files, and the file itself for its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtspec.gguf.config import hf_config, hf_generation_config
from trtspec.gguf.file import GgufFile
from trtspec.gguf.metadata import MetadataReader
from trtspec.gguf.tokenizer import hf_tokenizer

WEIGHTS = "model.gguf"
"""Name of the GGUF file in such a folder, where it is a link."""


def write_texts(file: GgufFile, folder: Path, role: str = "target") -> dict[str, Any]:
    """Write config.json, generation_config.json and the tokenizer's files to an existing folder. Return config.json.

    Raises the CheckpointError and UnsupportedError of hf_config and hf_tokenizer.
    """
    metadata = MetadataReader(file, role)
    config = hf_config(metadata)
    texts = {"config.json": config, "generation_config.json": hf_generation_config(config)}
    tokenizer = hf_tokenizer(metadata, config["vocab_size"])
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer[0], encoding="utf-8")
        texts["tokenizer_config.json"] = tokenizer[1]
    for name, values in texts.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return config
