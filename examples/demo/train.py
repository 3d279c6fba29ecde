"""Rebuild the demo checkpoints: data, tokenizer, target, draft, evaluation, MODEL_CARD.md.

    python examples/demo/train.py                       # about 100 minutes of training on two CPU cores
    python examples/demo/train.py --steps 20 --generated 16 --run runs/try --out runs/try/out    # does it work at all?

It may be interrupted at any time. The same command then goes on where it was, and loses at most a minute.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.models.decoder import Decoder
from trtspec.models.weights import load_decoder
from trtspec.train.card import CardContents, ModelSummary, model_card
from trtspec.train.checkpoint import write_atomically
from trtspec.train.data import Shards, Tokens, Windows, prepare
from trtspec.train.evaluate import greedy_acceptance, held_out_prompts, perplexity
from trtspec.train.export import export
from trtspec.train.generate import continue_windows
from trtspec.train.language_model import (
    LanguageModel,
    compiled,
    distillation_loss,
    initialise,
    llama_spec,
    next_token_loss,
)
from trtspec.train.trainer import Stage, TrainConfig, Trainer

VOCAB_SIZE = 4096
TARGET_LAYERS, DRAFT_LAYERS = 8, 1
TARGET_SHARE = 0.63  # of --minutes
PROMPT, NEW = 64, 192  # tokens of a prompt, and of the target's continuation, for the draft to learn from
EVAL_PROMPTS, EVAL_NEW = 40, 128
PERPLEXITY_WINDOWS = (512, 2048)
DTYPE = torch.bfloat16


def main() -> None:
    args = arguments()
    shards = prepare(args.run / "data", VOCAB_SIZE)
    target = target_trainer(args, shards)
    if args.early and not (args.run / "evaluation-early.json").is_file():
        target.run(pause_at=args.early)
        draft = draft_trainer(args, shards, target, own=None)
        draft.run(pause_at=args.early)
        ship(args, shards, target, draft, "early")
    target.run()
    draft = draft_trainer(args, shards, target, target_samples(args, shards, target))
    draft.run()
    ship(args, shards, target, draft, "final")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=100.0, help="training time of both models (default 100)")
    length.add_argument("--steps", type=int, help="optimizer steps of each model, instead of --minutes")
    parser.add_argument("--generated", type=int, default=2048, help="target continuations the draft learns from")
    parser.add_argument("--early", type=float, default=0.0, help="also ship a pair after this fraction of the run")
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="folder of the run's state")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where target/ and draft/ go")
    args = parser.parse_args()
    if not 0.0 <= args.early < 1.0:
        parser.error(f"--early {args.early}: must be a fraction from 0 to below 1")
    return args


def train_config(args: argparse.Namespace, share: float) -> TrainConfig:
    return TrainConfig(steps=args.steps, minutes=None if args.steps else args.minutes * share)


def target_trainer(args: argparse.Namespace, shards: Shards) -> Trainer:
    """Trainer of the target.

    Short windows come first, as a CPU is fastest with them. Long ones come last, so that long contexts work.
    """
    model = LanguageModel(initialise(Decoder(llama_spec(VOCAB_SIZE, TARGET_LAYERS)), seed=0))
    stages = [
        Stage(0.70, (Windows(shards.train, 256, 8, seed=1),)),
        Stage(0.88, (Windows(shards.train, 512, 4, seed=1),)),
        Stage(1.00, (Windows(shards.train, 2048, 1, seed=1),), micro_batches=2),
    ]
    loss = compiled(next_token_loss(model, DTYPE))
    return Trainer(model, loss, stages, train_config(args, TARGET_SHARE), args.run / "target", "target")


def draft_trainer(args: argparse.Namespace, shards: Shards, target: Trainer, own: Tokens | None) -> Trainer:
    """Trainer of the draft.

    The draft learns from the corpus up to its early pair (or a quarter), and then from the corpus and `own` in turn.
    """
    model = LanguageModel(initialise(Decoder(llama_spec(VOCAB_SIZE, DRAFT_LAYERS)), seed=1))
    teacher = LanguageModel(Decoder(llama_spec(VOCAB_SIZE, TARGET_LAYERS)))
    teacher.load_state_dict(target.model.state_dict())
    corpus = Windows(shards.train, 256, 8, seed=2)
    both = (corpus,) if own is None else (corpus, Windows(own, PROMPT + NEW, 8, seed=3, shifted=False))
    stages = [Stage(args.early or 0.25, (corpus,)), Stage(1.0, both)]
    loss = compiled(distillation_loss(model, teacher.requires_grad_(False), DTYPE))
    return Trainer(model, loss, stages, train_config(args, 1 - TARGET_SHARE), args.run / "draft", "draft")


def target_samples(args: argparse.Namespace, shards: Shards, target: Trainer) -> Tokens:
    """The target's greedy continuations of training windows, [N] uint16; made once."""
    file = args.run / "target_samples.npy"
    if not file.is_file():
        export(decoder_of(target), shards.tokenizer_file, args.run / "target_export")
        decoder = load_decoder(ModelConfig.from_folder(args.run / "target_export"), DTYPE)
        prompts = Windows(shards.train, PROMPT, args.generated, seed=4).batch(0)[0]
        partial = file.with_suffix(".tmp.npy")
        np.save(partial, continue_windows(decoder, prompts, NEW))
        partial.replace(file)
    own: Tokens = np.load(file, mmap_mode="r")
    return own


def decoder_of(trainer: Trainer) -> Decoder:
    assert isinstance(trainer.model, LanguageModel)
    return trainer.model.decoder


def ship(args: argparse.Namespace, shards: Shards, target: Trainer, draft: Trainer, stage: str) -> None:
    """Export both models, measure the exported checkpoints, and write evaluation.json and MODEL_CARD.md."""
    decoders, facts = [], []
    for name, trainer in (("target", target), ("draft", draft)):
        folder = args.out / name
        export(decoder_of(trainer), shards.tokenizer_file, folder)
        decoder = load_decoder(ModelConfig.from_folder(folder, name), DTYPE, name)
        decoders.append(decoder)
        facts.append(
            ModelSummary(
                layers=decoder.spec.num_layers,
                hidden=decoder.spec.hidden_size,
                parameters=decoder.spec.num_parameters,
                megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
                steps=trainer.step,
                tokens=trainer.tokens,
                minutes=trainer.seconds / 60,
                loss=trainer.loss,
                perplexity={w: perplexity(decoder, shards.held_out, w, 32_768) for w in PERPLEXITY_WINDOWS},
            )
        )
    prompts = held_out_prompts(shards.held_out, EVAL_PROMPTS, PROMPT)
    card = CardContents(
        data=shards.facts,
        target=facts[0],
        draft=facts[1],
        acceptance=greedy_acceptance(decoders[0], decoders[1], prompts, EVAL_NEW),
        prompts=(EVAL_PROMPTS, PROMPT, EVAL_NEW),
        command=f"python examples/demo/train.py {length_flag(args)}",
        torch_version=torch.__version__,
        stage=stage,
    )
    write_atomically(args.run / f"evaluation-{stage}.json", json.dumps(card.as_json(), indent=2).encode())
    write_atomically(args.out / "MODEL_CARD.md", model_card(card).encode())
    print(f"{stage}: acceptance length {card.acceptance.length:.2f}, per position {card.acceptance.per_position}")


def length_flag(args: argparse.Namespace) -> str:
    return f"--steps {args.steps}" if args.steps else f"--minutes {args.minutes:g}"


if __name__ == "__main__":
    main()
