"""`trtspec train eagle3`: a target and data in, a head in the public EAGLE3 layout out. A killed run goes on."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from trtspec.config.capture import default_capture_layers
from trtspec.config.model import ModelConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.models.decoder import Decoder
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.eagle3_weights import eagle3_tensors
from trtspec.models.weights import DTYPES, load_decoder
from trtspec.train.checkpoint import write_atomically
from trtspec.train.data import Tokens, Windows, load_tokenizer
from trtspec.train.eagle3 import Eagle3Loss, Lessons, frequent_tokens, new_head
from trtspec.train.eagle3_evaluate import chain_acceptance
from trtspec.train.generate import continue_windows
from trtspec.train.shards import ShardLessons, open_shards, shard_files, shard_tokens
from trtspec.train.trainer import Source, Stage, TrainConfig, Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """What makes a run; the same options continue the run in `run`, others are refused there once it has a checkpoint
    (those in MAY_CHANGE are free).

    data: text files or folders of them, or .npy files of token ids; or shards of hidden states (.safetensors), or
    folders of them, from which the head learns as they are: no own words, and the target does not run.
    capture_layers: "after layer i", None = the shards', or EAGLE3's default. draft_vocab_size: ids the head can say,
    None = all. own_words: prompts (cut from the data) that the target continues greedily by `own_words_len` tokens,
    half of what the head then learns from: it will be used on the target's text, not on people's. unroll: passes per
    lesson. dtype: of the arithmetic; weights are kept in fp32. held_out: text or ids as in `data`, on which the trained
    head is measured (see eagle3_evaluate; run/evaluation.json). checkpoint_seconds: a kill costs at most the training
    of so long. compile: through torch.compile where a C++ compiler is at hand, which takes minutes before the first
    step and is worth it for runs of more than that.
    """

    target: Path
    data: tuple[Path, ...]
    out: Path
    run: Path
    minutes: float | None = None
    steps: int | None = None
    capture_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    own_words: int = 2048
    own_words_len: int = 192
    unroll: int = 4
    seq_len: int = 256
    batch_size: int = 8
    learning_rate: float = 4e-3
    seed: int = 0
    dtype: str = "bfloat16"
    held_out: Path | None = None
    checkpoint_seconds: float = 60.0
    compile: bool = True

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("data=() is empty; give text files, folders of them, or .npy files of token ids")
        for name in ("unroll", "batch_size", "own_words_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seq_len <= self.unroll + 1:
            raise ConfigError(f"seq_len={self.seq_len} must exceed unroll + 1 = {self.unroll + 1}")
        if self.own_words and self.own_words < self.batch_size + 2:
            raise ConfigError(
                f"own_words={self.own_words} make no batch_size={self.batch_size}; use at least {self.batch_size + 2}, "
                "or 0 to learn from the data alone"
            )
        for name in ("draft_vocab_size", "intermediate_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; leave it out for the target's")
        if self.held_out is not None and self.own_words_len < self.unroll + 2:
            raise ConfigError(
                f"own_words_len={self.own_words_len} is too short to measure unroll={self.unroll} drafts on held_out; "
                f"use at least {self.unroll + 2}"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate={self.learning_rate} must be positive; the default is 4e-3")
        if not self.checkpoint_seconds >= 0:
            raise ConfigError(f"checkpoint_seconds={self.checkpoint_seconds} must not be negative")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}; use one of {', '.join(DTYPES)}")
        self.train_config()

    def train_config(self) -> TrainConfig:
        """Length and learning rates of the run."""
        return TrainConfig(
            steps=self.steps,
            minutes=self.minutes,
            matrix_lr=self.learning_rate,
            other_lr=self.learning_rate,
            checkpoint_seconds=self.checkpoint_seconds,
        )

    def as_json(self) -> dict[str, Any]:
        """What has to stay the same when a run is continued."""
        return json.loads(json.dumps(asdict(self), default=str))  # type: ignore[no-any-return]


MAY_CHANGE = ("out", "held_out", "checkpoint_seconds", "compile")
"""Options that a continued run need not share with its beginning."""

PROMPT_LEN = 64
"""Tokens of the data that the target's own words continue."""


def train_eagle3(options: Eagle3Options) -> Trainer:
    """Run (or continue) the training, export the head to `options.out` and measure it on `options.held_out`.

    Raises ConfigError, CheckpointError or OSError before anything is trained where the options, the target or the data
    cannot be used. KeyboardInterrupt comes through; what was trained is then saved in `options.run`.
    """
    config = ModelConfig.from_folder(options.target)
    target = load_decoder(config, DTYPES[options.dtype]).train()
    _remember(options)
    files = read_shard_files(options)
    shards = open_shards(files, config.hidden_size, config.vocab_size) if files else []
    capture = options.capture_layers
    if capture is None:
        capture = shards[0].facts.capture_layers if shards else default_capture_layers(config.num_layers)
    if shards and shards[0].facts.capture_layers != capture:
        raise ConfigError(f"capture_layers={capture}: the shards hold {shards[0].facts.capture_layers}; leave it unset")
    if not capture or any(not 0 <= i < config.num_layers for i in capture):
        raise ConfigError(
            f"capture_layers={capture}: the target has {config.num_layers} layers; use ids in "
            f"[0, {config.num_layers - 1}]"
        )
    continues = options.held_out is not None or (options.own_words and not shards)
    longest = max(options.seq_len, continues * (PROMPT_LEN + options.own_words_len)) + options.unroll
    if longest > config.max_position_embeddings:
        raise ConfigError(
            f"seq_len={options.seq_len}, own_words_len={options.own_words_len}, unroll={options.unroll}: the target "
            f"has {config.max_position_embeddings} positions, and these need {longest}; lower them"
        )
    size = options.draft_vocab_size or config.vocab_size
    if size > config.vocab_size:
        raise ConfigError(f"draft_vocab_size={size}: the target's vocabulary has {config.vocab_size} ids")
    options.out.mkdir(parents=True, exist_ok=True)  # now, rather than after hours of training
    prompts = None if options.held_out is None else held_out_prompts(options, config.vocab_size)
    lessons: tuple[Source, ...]
    if shards:
        dtype = DTYPES[options.dtype]
        lessons = (ShardLessons(shards, options.seq_len, options.batch_size, options.seed, dtype),)
        counted = shard_tokens(shards)
    else:
        sources, counted = windows_of(options, target)
        lessons = tuple(Lessons(windows, target, capture) for windows in sources)
    torch.manual_seed(options.seed)
    head = new_head(target, capture, frequent_tokens(counted, config.vocab_size, size), options.intermediate_size)
    loss = Eagle3Loss(head, target, options.unroll, DTYPES[options.dtype], compile=options.compile)
    trainer = Trainer(
        head,
        loss,
        [Stage(1.0, lessons)],
        options.train_config(),
        options.run,
        "eagle3",
        metrics=loss.metrics,
    )
    trainer.run()
    export_eagle3(head, config, capture, options.out)
    if prompts is not None:
        text = continue_windows(target.eval(), prompts, options.own_words_len).reshape(len(prompts), -1)
        found = chain_acceptance(head, target, capture, text, PROMPT_LEN, options.unroll)
        evaluation = {
            "held_out": str(options.held_out),
            "acceptance_length": found.length,
            "acceptance_per_position": found.per_position,
            "num_draft_tokens": options.unroll,
            "steps": found.steps,
            "prompts": len(prompts),
            "step": trainer.step,
        }
        write_atomically(options.run / "evaluation.json", (json.dumps(evaluation, indent=2) + "\n").encode())
    return trainer


def windows_of(options: Eagle3Options, target: Decoder) -> tuple[list[Windows], Tokens]:
    """What a run on text learns from, and the tokens among which it finds its vocabulary."""
    tokens = read_tokens(options, target.spec.vocab_size)
    sources = [Windows(tokens, options.seq_len, options.batch_size, seed=options.seed)]
    if not options.own_words:
        return sources, tokens
    own = own_words(options, target, tokens)
    length = own.shape[1]
    own = own.reshape(-1)
    sources.append(Windows(own, length, options.batch_size, seed=options.seed + 1, shifted=False))
    return sources, own


def export_eagle3(
    head: Eagle3Head, target: ModelConfig, capture: Sequence[int], folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Config and weights (as `dtype`) in the public layout, old or new but never half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in eagle3_tensors(head).items()
    }
    staging = folder / "model.safetensors.tmp"
    save_file(tensors, staging, metadata={"format": "pt"})
    staging.chmod(0o644)  # save_file makes its file private
    os.replace(staging, folder / "model.safetensors")
    config = json.dumps(eagle3_config(head, target, capture, dtype), indent=2) + "\n"
    write_atomically(folder / "config.json", config.encode())


def eagle3_config(head: Eagle3Head, target: ModelConfig, capture: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the public layout, rotary positions as the target has them."""
    spec = head.spec.layer
    if any(i < 0 for i in capture):
        raise ConfigError(f"capture_layers={tuple(capture)}: the public layout cannot name the stream after the norm")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": head.spec.draft_vocab_size,
        "hidden_size": spec.hidden_size,
        "target_hidden_size": head.spec.target_hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        **{key: target.raw[key] for key in ("rope_theta", "rope_scaling", "rope_parameters") if key in target.raw},
        "max_position_embeddings": spec.max_position_embeddings,
        "norm_before_residual": head.spec.norm_before_residual,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in capture],  # there, an id is the layer entered
        },
        "bos_token_id": target.bos_token_id,
        "eos_token_id": min(target.eos_token_ids, default=None),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def read_tokens(options: Eagle3Options, vocab_size: int) -> Tokens:
    """All data as one row of ids [N], made once per run. Text is encoded by the target's tokenizer."""
    shard = options.run / "tokens.npy"
    if not shard.is_file():
        parts = [_tokens_of(path, options.target, vocab_size) for path in options.data]
        _save(shard, np.concatenate(parts))
    tokens: Tokens = np.load(shard, mmap_mode="r")
    return tokens


def own_words(options: Eagle3Options, target: Decoder, tokens: Tokens) -> Tokens:
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
        ids = continue_windows(target.eval(), prompts, options.own_words_len)
        target.train()
        _save(shard, ids.reshape(count, -1))
    own: Tokens = np.load(shard, mmap_mode="r")
    return own


def read_shard_files(options: Eagle3Options) -> list[Path]:
    """The shards of hidden states in `data`, [] where it is text. Listed once per run: the folder may be growing."""
    listing = options.run / "shards.json"
    if listing.is_file():
        return [Path(name) for name in json.loads(listing.read_text())]
    files = shard_files(options.data)
    if files:
        write_atomically(listing, json.dumps([str(file) for file in files]).encode())
    return files


def held_out_prompts(options: Eagle3Options, vocab_size: int, most: int = 64) -> Tensor:
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


def _save(path: Path, ids: Tokens) -> None:
    partial = path.with_suffix(".tmp.npy")
    np.save(partial, ids)
    partial.replace(path)


def _remember(options: Eagle3Options) -> None:
    """A run folder belongs to one set of options, from its first checkpoint on."""
    options.run.mkdir(parents=True, exist_ok=True)
    file, ours = options.run / "options.json", options.as_json()
    if file.is_file():
        try:
            theirs = json.loads(file.read_text())
        except ValueError as error:
            raise CheckpointError(f"{file} is damaged ({error}); delete {options.run} to start over") from error
        changed = [name for name in ours if ours[name] != theirs.get(name) and name not in MAY_CHANGE]
        if changed and not any(options.run.glob("step-*.pt")):  # nothing is trained yet: only the data is made anew
            for name in ("tokens.npy", "own_words.npy", "shards.json"):
                (options.run / name).unlink(missing_ok=True)
        elif changed:
            raise ConfigError(
                f"{options.run} holds a run with another {', '.join(changed)} "
                f"({', '.join(f'{name}={theirs.get(name)}' for name in changed)}); continue it with the same options, "
                "or choose another folder for this run"
            )
    free = shutil.disk_usage(options.run).free
    if free < 2**28:
        raise ConfigError(f"{options.run}: {free >> 20} MiB are free on its disk; a run needs some hundreds")
    write_atomically(file, json.dumps(ours, indent=2).encode())
