"""`trtspec train`: trains a draft head for a target on data, and writes it in its public layout.

A killed run can be continued.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace

import torch

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.methods.table import METHODS
from trtspec.models.decoder import Decoder
from trtspec.models.weights import DTYPES, load_decoder
from trtspec.train.arithmetic import fast_dtype
from trtspec.train.chains import HeldOut, Watch
from trtspec.train.checkpoint import write_atomically
from trtspec.train.head import HeadOptions, dtype_name
from trtspec.train.run_data import (
    PROMPT_LEN,
    forget_data,
    held_out_prompts,
    held_out_texts,
    material_of,
    read_shard_files,
    speaker_of,
)
from trtspec.train.shards import ShardBatches, open_shards, shard_tokens
from trtspec.train.states import KeptStates, bytes_per_window
from trtspec.train.trainer import Source, Stage, Trainer
from trtspec.train.training_batches import LAST_STATE, TrainingBatches, Windows
from trtspec.train.unrolled import TrainingLoss

KINDS: dict[str, type[HeadOptions]] = {
    name: row.trainer.open() for name, row in METHODS.items() if row.trainer is not None
}
"""Method -> options of the heads that can be trained for it."""

MAY_CHANGE = ("out", "held_out", "checkpoint_seconds", "states_gib", "minutes", "steps")
"""Options in which a continued run may differ from its beginning: a longer run continues where a run has ended."""

_STATES = "states"
"""Folder of a run: the target's states of the run's windows."""


def train_head(options: HeadOptions) -> Trainer:
    """Run (or continue) the training, export the head to `options.out` and measure it on `options.held_out`.

    Raises ConfigError, CheckpointError, UnsupportedError or OSError before any training if the options, the target or
    the data cannot be used. KeyboardInterrupt is passed on; what was trained is then saved in `options.run`.
    """
    config = ModelConfig.from_folder(options.target)
    options.check_target(config)
    options = _remember(options)
    dtype = DTYPES[options.dtype]
    files = read_shard_files(options)
    shards = open_shards(files, config.hidden_size, config.vocab_size) if files else []
    capture = _capture_layers(options, config, shards[0].metadata.capture_layers if shards else None)
    _check_positions(options, config, from_text=not shards)
    options.out.mkdir(parents=True, exist_ok=True)  # fails now, rather than after hours of training
    material = None if shards else material_of(options, config)  # its engine closes before the target is loaded
    held_out = _held_out_of_shards(options, config) if material is None else material.held_out
    target = load_decoder(config, dtype)
    # training mode computes its states by torch's products; ours are much faster in bf16 without instructions for it
    target.train(dtype in (torch.float32, fast_dtype()))
    training_batches: tuple[Source, ...]
    if material is None:
        training_batches = (ShardBatches(shards, options.seq_len, options.batch_size, options.seed, target),)
        said = shard_tokens(shards)
    else:
        training_batches, said = tuple(_training_batches(options, material.windows, target, capture)), material.said
    torch.manual_seed(options.seed)
    head = options.new_head(target, capture, said)
    loss = options.loss(head, target, capture)
    texts = HeldOut(target, capture, held_out, options.unroll, moving=options.moving) if held_out else None
    watched: list[TrainingLoss | Watch] = [loss, *([Watch(texts, head)] if texts else [])]

    def begin(progress: float) -> None:
        for one in watched:
            one.begin(progress)

    trainer = Trainer(
        head,
        loss,
        [Stage(1.0, training_batches)],
        options.train_config(),
        options.run,
        options.method,
        metrics=lambda: {name: value for one in watched for name, value in one.metrics().items()},
        before_step=begin,
    )
    trainer.run()
    options.export(head, config, capture)
    if texts:
        found = texts.acceptance(head)
        evaluation = {
            "held_out": str(options.held_out),
            "acceptance_length": found.length,
            "acceptance_per_position": found.per_position,
            "num_draft_tokens": options.unroll,
            "steps": found.steps,
            "prompts": len(held_out),
            "step": trainer.step,
        }
        write_atomically(options.run / "evaluation.json", (json.dumps(evaluation, indent=2) + "\n").encode())
    return trainer


def _held_out_of_shards(options: HeadOptions, config: ModelConfig) -> list[tuple[list[int], int]]:
    with speaker_of(options) as speaker:
        return held_out_texts(options, held_out_prompts(options, config.vocab_size), speaker)


def _training_batches(
    options: HeadOptions, sources: Sequence[Windows], target: Decoder, capture: tuple[int, ...]
) -> list[TrainingBatches]:
    """Return a source of training batches for each kind of windows.

    The sources share the disk space for kept states; each takes what the sources before it leave.
    """
    widths = (len(capture) * target.spec.hidden_size, target.spec.hidden_size)
    dtype = DTYPES[options.dtype]
    folder = options.run / _STATES
    kept = sum(file.stat().st_size for file in folder.glob("*.bin"))
    left = int(min(options.states_gib * 2**30, kept + shutil.disk_usage(options.run).free // 2))
    training_batches = []
    for number, windows in enumerate(sources):
        size = bytes_per_window(windows.seq_len, widths, dtype)
        count = min(len(windows), left // size)
        left -= count * size
        states = KeptStates(folder, f"{number}", count, windows.seq_len, widths, dtype) if count else None
        seed = options.seed + number
        training_batches.append(TrainingBatches(windows, target, capture, options.batch_size, seed, states))
    return training_batches


def _capture_layers(options: HeadOptions, config: ModelConfig, saved: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the layers that the head reads. ConfigError for layers that the shards do not hold.

    All shards hold the target's last states; other layers are in some of them.
    """
    capture = options.layers_read(config, saved)
    if saved not in (None, capture) and capture != LAST_STATE:
        raise ConfigError(
            f"capture_layers={capture}: the shards hold {saved}; leave it unset, or use shards of these layers"
        )
    return capture


def _check_positions(options: HeadOptions, config: ModelConfig, from_text: bool) -> None:
    """Raise ConfigError if windows, or the target's own outputs, exceed the positions of the target."""
    continues = options.held_out is not None or (options.regenerate and from_text)
    longest = max(options.seq_len, continues * (PROMPT_LEN + options.regenerate_len)) + options.unroll
    if longest > config.max_position_embeddings:
        raise ConfigError(
            f"seq_len={options.seq_len}, regenerate_len={options.regenerate_len}, unroll={options.unroll}: the target "
            f"has {config.max_position_embeddings} positions, and these need {longest}; lower them"
        )


def _remember(options: HeadOptions) -> HeadOptions:
    """Write the options to the run folder, and return them with what is decided once: the dtype.

    A run folder belongs to one set of options, from its first checkpoint on.
    """
    options.run.mkdir(parents=True, exist_ok=True)
    file = options.run / "options.json"
    theirs = {}
    if file.is_file():
        try:
            theirs = {"kind": "eagle3", **json.loads(file.read_text())}  # a file without a kind is EAGLE3's
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); delete {options.run} to start over") from error
    if options.dtype == "auto":
        options = replace(options, dtype=theirs.get("dtype") or dtype_name(fast_dtype()))
    ours = options.as_json()
    if theirs:
        changed = [name for name in ours if ours[name] != theirs.get(name) and name not in MAY_CHANGE]
        if changed and not any(options.run.glob("step-*.pt")):  # nothing is trained yet: only the data is made again
            forget_data(options.run)
            shutil.rmtree(options.run / _STATES, ignore_errors=True)
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
    return options
