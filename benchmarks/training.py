"""How fast an EAGLE3 head is trained, and where the time goes.

    python benchmarks/training.py MODEL
    python benchmarks/training.py MODEL --dtype float32 --busy

The model continues `--prompts` pieces of 64 tokens of the source of Python's standard library, by 192 tokens each, in
its engine: this is regeneration. Then a head of 8,192 draft ids is trained in windows of 256, 8 at a time, 4 passes.
The first epoch runs the model; later epochs read the kept states. Speeds are tokens a second, medians of steps. The
last column compares the arithmetic that a step needs with the speed of this machine's products in that dtype, measured
in the same run. The last table shows what torch's profiler finds in a step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.hub.folders import checkpoint_folder
from trtspec.methods.capture import default_capture_layers
from trtspec.methods.eagle3.train import new_head
from trtspec.models.decoder import Decoder
from trtspec.models.weights import DTYPES, load_decoder
from trtspec.ops.dispatch import load_plugins
from trtspec.train.arithmetic import fast_dtype
from trtspec.train.data import Tokens, load_tokenizer, standard_library
from trtspec.train.regenerate import Manner, Speaker
from trtspec.train.states import KeptStates
from trtspec.train.trainer import Stage, TrainConfig, Trainer
from trtspec.train.training_batches import TextWindows, TrainingBatches, frequent_tokens
from trtspec.train.unrolled import HeadLoss

SEQ, BATCH, UNROLL, DRAFT_IDS = 256, 8, 4, 8192
PROMPT, NEW = 64, 192


def spin() -> None:
    while True:
        pass


def library_tokens(model: Path, count: int) -> Tokens:
    """The first `count` ids of the standard library's source."""
    tokenizer = load_tokenizer(model / "tokenizer.json")
    ids: list[int] = []
    for file in standard_library():
        ids += tokenizer.encode(file.text, add_special_tokens=False).ids
        if len(ids) >= count:
            break
    return np.asarray(ids[:count], dtype=np.uint32)


def regeneration(model: Path, tokens: Tokens, prompts: int, folder: Path) -> float:
    """Tokens a second, without the engine's start."""
    given = [tokens[i * PROMPT : (i + 1) * PROMPT].tolist() for i in range(prompts)]
    with Speaker(model, folder / "words", PROMPT + NEW) as speaker:
        few = min(64, prompts)  # prompts that start the engine of so large a batch
        speaker.say("warm-up", given[:few], [Manner(ignore_eos=True).params(2)] * few)
        begin = time.perf_counter()
        words = speaker.say("text", given, [Manner(ignore_eos=True).params(NEW)] * prompts)
        return sum(len(one.ids) for one in words) / (time.perf_counter() - begin)


def peak(dtype: torch.dtype) -> float:
    """FLOP/s of a product of [2048, 1536] and [1536, 1536]."""
    a, b = torch.randn(2048, 1536, dtype=dtype), torch.randn(1536, 1536, dtype=dtype)
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    return 2.0 * 2048 * 1536 * 1536 / statistics.median(times[2:])


def flop(target: Decoder, head: torch.nn.Module) -> tuple[float, float]:
    """Multiplications and additions per token of the first epoch, and of later ones. Attention's are left out."""
    size = {name: parameter.numel() for name, parameter in head.named_parameters() if parameter.requires_grad}
    once = size["fc.weight"]
    passes = sum(size.values()) - once
    learns = 6.0 * (once + UNROLL * passes)
    says = 2.0 * DRAFT_IDS * target.spec.hidden_size
    embedding = target.embedding.weight.numel()
    whole = sum(parameter.numel() for parameter in target.parameters())
    runs = 2.0 * (whole - (0 if target.head.weight is target.embedding.weight else embedding))
    return learns + says + runs, learns + says


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder, GGUF file or name on the Hub")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--prompts", type=int, default=128, help="of regeneration; 0: leave it out")
    parser.add_argument("--batches", type=int, default=6, help="in an epoch")
    parser.add_argument("--busy", action="store_true", help="next to a process that keeps a core busy")
    args = parser.parse_args()
    folder = checkpoint_folder(args.model)
    isa = load_plugins().get("cpu", "reference kernels")
    dtype = fast_dtype() if args.dtype == "auto" else DTYPES[args.dtype]
    other = multiprocessing.Process(target=spin, daemon=True)
    if args.busy:
        other.start()
    tokens = library_tokens(folder, max(args.batches * BATCH * SEQ, args.prompts * PROMPT))
    print(
        f"{isa}, {dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| stage | tok/s | of the product's speed |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        if args.prompts:
            print(f"| regeneration, batch {min(64, args.prompts)} | "
                  f"{regeneration(folder, tokens, args.prompts, Path(scratch)):,.0f} | |", flush=True)  # fmt: skip
        target = load_decoder(ModelConfig.from_folder(folder), dtype).train()
        torch.manual_seed(0)
        capture = default_capture_layers(target.spec.num_layers)
        head = new_head(target, capture, frequent_tokens(tokens, target.spec.vocab_size, DRAFT_IDS))
        windows = TextWindows(tokens[: args.batches * BATCH * SEQ], SEQ)
        widths = (len(capture) * target.spec.hidden_size, target.spec.hidden_size)
        kept = KeptStates(Path(scratch) / "states", "0", len(windows), SEQ, widths, dtype)
        training_batches = TrainingBatches(windows, target, capture, BATCH, 0, kept)
        loss = HeadLoss(head, target, UNROLL, dtype, capture_layers=capture)
        clock = [time.perf_counter()]
        trainer = Trainer(
            head, loss, [Stage(1.0, (training_batches,))], TrainConfig(steps=2 * args.batches, checkpoint_seconds=1e9),
            Path(scratch) / "run", after_step=lambda step, loss: clock.append(time.perf_counter()),
        )  # fmt: skip
        trainer.run()
        steps = [BATCH * SEQ / (end - begin) for begin, end in pairwise(clock)]
        fastest = peak(dtype)
        for stage, speeds, work in zip(
            ("first epoch", "later epochs"), (steps[1 : args.batches], steps[args.batches :]), flop(target, head),
            strict=True,
        ):  # fmt: skip
            speed = statistics.median(speeds)
            print(f"| {stage} | {speed:,.0f} | {speed * work / fastest:.0%} of {fastest / 1e9:,.0f} GFLOP/s |")
        shares(training_batches, loss)
    return 0


def shares(training_batches: TrainingBatches, loss: HeadLoss) -> None:
    """Print the shares of time of a step of the first epoch."""
    training_batches.kept = None
    with profile(activities=[ProfilerActivity.CPU]) as found:
        loss(*training_batches.batch(0)).backward()  # type: ignore[no-untyped-call]
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in events)
    print("\n| op | share of a step |\n|---|---|")
    for event in events[:8]:
        print(f"| {event.key} | {event.self_cpu_time_total / whole:.0%} |")


if __name__ == "__main__":
    sys.exit(main())
