"""`trtspec convert`: write any model that trtspec reads as a Hugging Face folder of safetensors files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trtspec.config.checkpoint.folder import read_checkpoint
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.gguf.folder import WEIGHTS
from trtspec.models.weights import DTYPES, checkpoint_tensors, of_decoder

_TEXTS = ("*.json", "*.jinja", "tokenizer.model", "additional_chat_templates/*.jinja")
_INDEX = "model.safetensors.index.json"
_SHARD = 2 * 10**9  # bytes: limit of a file, unless one tensor is larger; converting needs that much memory


def convert(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    dtype: str = "auto",
    report: Callable[[str], None] = lambda what: None,
) -> Path:
    """Write `model` to the new folder `output`, and return that folder.

    model: a folder, a GGUF file or a name on the Hub. Weights of a GGUF file are dequantised. dtype: that of the
    weights, "auto" = as the model's config.json says. `output` appears only when it is complete.

    Raises ConfigError if the folder is taken, UnsupportedError for a folder of quantised weights, which loads as it is,
    and what loading the model would raise.
    """
    output = Path(output).resolve()
    if output.exists():
        raise ConfigError(f"{output} exists; choose another output folder")
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype = {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    config = ModelConfig.of(read_checkpoint(model, "target"))
    if config.quantization is not None and not (config.path / WEIGHTS).is_file():
        raise UnsupportedError(f"{model} is quantised already ({config.quantization}) and loads as it is; use it so")
    name = config.dtype if dtype == "auto" else dtype
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
    try:
        made = staging / "model"
        made.mkdir()
        _write_weights(config, made, DTYPES[name], report)
        for pattern in _TEXTS:
            for file in config.path.glob(pattern):
                if file.name not in ("config.json", _INDEX):
                    to = made / file.relative_to(config.path)
                    to.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, to)
        data = {
            key: value for key, value in config.raw.items() if key not in ("torch_dtype", "quantization_config")
        } | {"dtype": name}
        (made / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        made.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return output


def _write_weights(config: ModelConfig, folder: Path, dtype: torch.dtype, report: Callable[[str], None]) -> None:
    names: dict[str, list[str]] = {}
    for number, shard in enumerate(_shards(config, dtype), 1):
        file = f"model-{number:05d}.safetensors"
        report(f"writing {file}")
        save_file(shard, folder / file, metadata={"format": "pt"})
        names[file] = list(shard)
    if len(names) == 1:
        (folder / next(iter(names))).rename(folder / "model.safetensors")
        return
    index = {"metadata": {}, "weight_map": {name: file for file, inside in names.items() for name in inside}}
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _shards(config: ModelConfig, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in checkpoint_tensors(config.path, "target", of_decoder(config)):
        if shard and size + tensor.numel() * dtype.itemsize > _SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.to(dtype).contiguous()
        size += shard[name].nbytes
    yield shard
