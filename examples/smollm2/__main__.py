"""SmolLM2-135M-Instruct as a folder, and the training of the EAGLE3 head that is shipped next to this file.

    make smollm2                        # downloads the model and writes build/smollm2/model
    make smollm2 ARGS="--train"         # makes the head anew: about an hour of answers, then --minutes of training

Each step of the training is kept under build/smollm2. A training that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from examples.smollm2.sources import FOLDER, human_eval, model_file
from trtspec.build.convert import convert
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import TrtSpecError
from trtspec.methods.capture import default_capture_layers

HERE = Path(__file__).parent
HEAD = HERE / "eagle3"
MODEL = FOLDER / "model"
QUESTIONS = HERE / "questions.jsonl"
"""Held-out conversations, a question each."""
CONVERSATIONS = 12000
HEAD_OPTIONS = {
    "draft-vocab-size": 8192, "unroll": 4, "single-pass": 0.6, "seq-len": 512, "batch-size": 4, "regenerate-len": 256,
}  # fmt: skip


def model_folder() -> Path:
    """Return the model as a Hugging Face folder in bf16, dequantised from Q4_1; make it if it is not there."""
    return MODEL if MODEL.is_dir() else convert(model_file(), MODEL)


def questions() -> list[str]:
    """The questions of the held-out conversations."""
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def train(minutes: float, out: Path) -> int:
    """Make prompts, answers and the head. Returns `trtspec train`'s exit status."""
    from examples.smollm2.answers import answer
    from examples.smollm2.overlap import Grams
    from examples.smollm2.prompts import write

    problems = human_eval()
    held_out = Grams([*questions(), *(text for one in problems for text in (one.prompt, one.solution))])
    prompts, states = FOLDER / "prompts.jsonl", FOLDER / "states"
    asked = write(prompts, CONVERSATIONS, held_out)
    print(f"prompts left out, as they share 13 words with what is held out: {asked} of code and others", flush=True)
    model = model_file()
    layers = default_capture_layers(ModelConfig.from_folder(model).num_layers)
    print(f"answers likewise: {answer(model, prompts, layers, states, held_out)}", flush=True)
    command = [sys.executable, "-m", "trtspec", "train", "eagle3", "--target", str(model), "--data", str(states)]
    command += ["--held-out", str(QUESTIONS), "--regenerate", "0", "--out", str(out), "--run", str(FOLDER / "run")]
    command += [f"--{name}={value}" for name, value in HEAD_OPTIONS.items()]
    return subprocess.run([*command, f"--minutes={minutes:g}"], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="make the head anew")
    parser.add_argument("--minutes", type=float, default=80, help="of training (default 80)")
    parser.add_argument("--out", type=Path, default=HEAD, help="folder for the head (default: the shipped one)")
    args = parser.parse_args()
    try:
        if args.train:
            return train(args.minutes, args.out)
        print(model_folder())
    except (TrtSpecError, OSError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
