"""What a run learns from and is measured on: text or ids or shards in, made once per run and kept in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trtspec.errors import CheckpointError, ConfigError
from trtspec.train.checkpoint import write_atomically
from trtspec.train.data import Tokens, Windows, load_tokenizer
from trtspec.train.head import HeadOptions
from trtspec.train.regenerate import forget, regenerate, save_ids
from trtspec.train.shards import shard_files

PROMPT_LEN = 64
"""Tokens of the data that the target's own words continue."""

MADE_ONCE = ("tokens.npy", "own_words.npy", "shards.json")
"""Files of a run that hold what was made of its data."""

PIECES = "own_words"
"""A folder of a run: the own words so far, until all are made."""


def windows_of(options: HeadOptions, vocab_size: int) -> tuple[list[Windows], Tokens]:
    """What a run on text learns from, and the tokens among which it finds its vocabulary."""
    tokens = read_tokens(options, vocab_size)
    sources = [Windows(tokens, options.seq_len, options.batch_size, seed=options.seed)]
    if not options.own_words:
        return sources, tokens
    own = own_words(options, tokens)
    length = own.shape[1]
    own = own.reshape(-1)
    sources.append(Windows(own, length, options.batch_size, seed=options.seed + 1, shifted=False))
    return sources, own


def read_tokens(options: HeadOptions, vocab_size: int) -> Tokens:
    """All data as one row of ids [N], made once per run. Text is encoded by the target's tokenizer."""
    shard = options.run / "tokens.npy"
    if not shard.is_file():
        parts = [_tokens_of(path, options.target, vocab_size) for path in options.data]
        save_ids(shard, np.concatenate(parts))
    tokens: Tokens = np.load(shard, mmap_mode="r")
    return tokens


def own_words(options: HeadOptions, tokens: Tokens) -> Tokens:
    """The target's greedy continuations of prompts of 64 tokens cut from the data, [count, length]; made once."""
    shard = options.run / "own_words.npy"
    if not shard.is_file():
        prompt_len = min(PROMPT_LEN, options.seq_len)
        count = min(options.own_words, len(tokens) // prompt_len - 2)
        if count < options.batch_size + 2:
            raise ConfigError(
                f"{len(tokens)} tokens of data make {max(count, 0)} prompts of {prompt_len} for own_words, less than "
                f"batch_size + 2 = {options.batch_size + 2}; use more data, or own_words=0"
            )
        prompts = Windows(tokens, prompt_len, count, seed=options.seed + 2).batch(0)[0]
        pieces = options.run / PIECES
        save_ids(shard, regenerate(options.target, prompts, options.own_words_len, pieces))
        forget(pieces)
    own: Tokens = np.load(shard, mmap_mode="r")
    return own


def read_shard_files(options: HeadOptions) -> list[Path]:
    """The shards of hidden states in `data`, [] where it is text. Listed once per run: the folder may be growing."""
    listing = options.run / "shards.json"
    if listing.is_file():
        return [Path(name) for name in json.loads(listing.read_text())]
    files = shard_files(options.data)
    if files:
        write_atomically(listing, json.dumps([str(file) for file in files]).encode())
    return files


def held_out_prompts(options: HeadOptions, vocab_size: int, most: int = 64) -> Tensor:
    """Up to `most` prompts spread over the held-out data, [count, PROMPT_LEN] int64."""
    assert options.held_out is not None
    tokens = _tokens_of(options.held_out, options.target, vocab_size)
    count = min(most, len(tokens) // PROMPT_LEN)
    if count < 1:
        raise ConfigError(
            f"held_out={options.held_out} holds {len(tokens)} tokens, less than one prompt of {PROMPT_LEN}; use more"
        )
    starts = np.linspace(0, len(tokens) - PROMPT_LEN, count).astype(int)
    return torch.from_numpy(np.stack([tokens[start : start + PROMPT_LEN] for start in starts]).astype(np.int64))


def _tokens_of(path: Path, target: Path, vocab_size: int) -> Tokens:
    if path.suffix == ".npy":
        try:
            ids: Tokens = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is no readable .npy file ({error})") from error
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
            raise CheckpointError(f"{path} holds {ids.dtype} {ids.shape}; token ids are one row of integers")
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise CheckpointError(
                f"{path} holds the ids {int(ids.min())}..{int(ids.max())}; the target's are 0..{vocab_size - 1}: use "
                "data made with its tokenizer"
            )
        return ids
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    texts = [text for text in map(_text_of, files) if text]
    if not texts:
        raise ConfigError(f"no UTF-8 text in {path}; pass text files, a folder of them, or .npy files of token ids")
    if not (target / "tokenizer.json").is_file():
        raise ConfigError(f"{target} has no tokenizer.json to read {path} with; pass .npy files of token ids")
    tokenizer = load_tokenizer(target / "tokenizer.json")
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings])


def _text_of(file: Path) -> str | None:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise ConfigError(f"data {file} cannot be read ({error}); check the path") from error
