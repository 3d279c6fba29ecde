"""`trtspec train`: a target and data in, a draft head in its public layout out. A killed run goes on."""

from __future__ import annotations

import json
import shutil

import torch

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.methods.table import METHODS
from trtspec.models.weights import DTYPES, load_decoder
from trtspec.train.chains import chain_acceptance
from trtspec.train.checkpoint import write_atomically
from trtspec.train.generate import continue_windows
from trtspec.train.head import HeadOptions
from trtspec.train.lessons import LAST_STATE, Lessons
from trtspec.train.regenerate import forget
from trtspec.train.run_data import MADE_ONCE, PIECES, PROMPT_LEN, held_out_prompts, read_shard_files, windows_of
from trtspec.train.shards import ShardLessons, open_shards, shard_tokens
from trtspec.train.trainer import Source, Stage, Trainer

KINDS: dict[str, type[HeadOptions]] = {
    name: row.trainer.open() for name, row in METHODS.items() if row.trainer is not None
}
"""Method -> the heads that can be trained for it."""

MAY_CHANGE = ("out", "held_out", "checkpoint_seconds", "compile")
"""Options that a continued run need not share with its beginning."""


def train_head(options: HeadOptions) -> Trainer:
    """Run (or continue) the training, export the head to `options.out` and measure it on `options.held_out`.

    Raises ConfigError, CheckpointError, UnsupportedError or OSError before anything is trained where the options, the
    target or the data cannot be used. KeyboardInterrupt comes through; what was trained is then saved in `options.run`.
    """
    config = ModelConfig.from_folder(options.target)
    options.check_target(config)
    dtype = DTYPES[options.dtype]
    _remember(options)
    files = read_shard_files(options)
    shards = open_shards(files, config.hidden_size, config.vocab_size) if files else []
    capture = _capture_layers(options, config, shards[0].facts.capture_layers if shards else None)
    _check_positions(options, config, from_text=not shards)
    options.out.mkdir(parents=True, exist_ok=True)  # now, rather than after hours of training
    prompts = None if options.held_out is None else held_out_prompts(options, config.vocab_size)
    sources, counted = ([], shard_tokens(shards)) if shards else windows_of(options, config.vocab_size)
    target = load_decoder(config, dtype).train()  # beside the engine of its own words it would be twice in memory
    lessons: tuple[Source, ...]
    if shards:
        lessons = (ShardLessons(shards, options.seq_len, options.batch_size, options.seed, dtype),)
    else:
        lessons = tuple(Lessons(windows, target, capture) for windows in sources)
    torch.manual_seed(options.seed)
    head = options.new_head(target, capture, counted)
    loss = options.loss(head, target, capture)
    trainer = Trainer(
        head,
        loss,
        [Stage(1.0, lessons)],
        options.train_config(),
        options.run,
        options.method,
        metrics=loss.metrics,
    )
    trainer.run()
    options.export(head, config, capture)
    if prompts is not None:
        text = continue_windows(target.eval(), prompts, options.own_words_len).reshape(len(prompts), -1)
        found = chain_acceptance(head, target, capture, text, PROMPT_LEN, options.unroll, moving=options.moving)
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


def _capture_layers(options: HeadOptions, config: ModelConfig, saved: tuple[int, ...] | None) -> tuple[int, ...]:
    """What the head reads. Any shards hold the target's last states; other layers they have or have not."""
    capture = options.layers_read(config, saved)
    if saved not in (None, capture) and capture != LAST_STATE:
        raise ConfigError(
            f"capture_layers={capture}: the shards hold {saved}; leave it unset, or use shards of these layers"
        )
    return capture


def _check_positions(options: HeadOptions, config: ModelConfig, from_text: bool) -> None:
    """ConfigError where windows, or the target's own words, are longer than the target can read."""
    continues = options.held_out is not None or (options.own_words and from_text)
    longest = max(options.seq_len, continues * (PROMPT_LEN + options.own_words_len)) + options.unroll
    if longest > config.max_position_embeddings:
        raise ConfigError(
            f"seq_len={options.seq_len}, own_words_len={options.own_words_len}, unroll={options.unroll}: the target "
            f"has {config.max_position_embeddings} positions, and these need {longest}; lower them"
        )


def _remember(options: HeadOptions) -> None:
    """A run folder belongs to one set of options, from its first checkpoint on."""
    options.run.mkdir(parents=True, exist_ok=True)
    file, ours = options.run / "options.json", options.as_json()
    if file.is_file():
        try:
            theirs = {"kind": "eagle3", **json.loads(file.read_text())}  # without a word, it is EAGLE3's
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); delete {options.run} to start over") from error
        changed = [name for name in ours if ours[name] != theirs.get(name) and name not in MAY_CHANGE]
        if changed and not any(options.run.glob("step-*.pt")):  # nothing is trained yet: only the data is made anew
            for name in MADE_ONCE:
                (options.run / name).unlink(missing_ok=True)
            forget(options.run / PIECES)
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
