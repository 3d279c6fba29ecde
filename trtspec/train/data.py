"""The corpus and its products: files, a held-out split, a tokenizer, token shards, batches.

The corpus is the source of the running Python's standard library, so every machine that can run trtspec has it. A
file's name alone decides whether it is held out, so no list has to be shipped.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from trtspec.errors import CheckpointError, ConfigError
from trtspec.train.checkpoint import write_atomically

END_OF_TEXT = "<|endoftext|>"
"""Separator of files in the shards. Its id is 0, and it is both BOS and EOS of the checkpoints."""

HELD_OUT_ONE_IN = 10
MAX_FILE_BYTES = 512 * 1024
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "lib-dynload"})
"""Folders of other people's packages and of generated tables (code pages, help topics): not hand-written code."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus; `name` is its path relative to the library's root, with forward slashes."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is held out: true for a fixed tenth of all names."""
        digest = hashlib.sha256(self.name.encode("utf-8")).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def standard_library(root: Path | None = None) -> list[SourceFile]:
    """Return every .py file of the standard library (or below `root`), sorted by name.

    It leaves out SKIPPED_FOLDERS, files over MAX_FILE_BYTES, empty files, and copies of a file already seen. It also
    leaves out files that are not UTF-8, because these test decoders. Raises ConfigError if no file is left.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or not 0 < path.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text not in seen:
            seen.add(text)
            files.append(SourceFile(relative.as_posix(), text))
    if not files:
        raise ConfigError(
            f"no Python source found under {root}; pass the folder of a standard library that has its .py"
        )
    return files


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of exactly the bytes and merges of `texts`.

    Any text round-trips, and no token is unknown. The GPT-2 word pattern keeps a line break and the indentation after
    it in one word, except for the last space, which joins the next word. So `"\\n        "` + `" return"` are two
    tokens, which is what makes Python cheap.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json; CheckpointError if it is missing or damaged."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} is not a readable tokenizer ({error}); delete it and train again") from error


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id of END_OF_TEXT; CheckpointError if the tokenizer has none and so is not one of ours."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise CheckpointError(f"the tokenizer has no {END_OF_TEXT}; use one made by train_tokenizer")
    return end


Tokens = npt.NDArray[Any]


def encode(tokenizer: Tokenizer, files: Sequence[SourceFile]) -> Tokens:
    """Return all files as one row of ids [N] uint16, with END_OF_TEXT before each file and after the last."""
    end = end_of_text_id(tokenizer)
    ids = [end]
    for encoding in tokenizer.encode_batch([file.text for file in files], add_special_tokens=False):
        ids += [*encoding.ids, end]
    return np.asarray(ids, dtype=np.uint16)


@dataclass(frozen=True)
class Shards:
    """The prepared corpus: train and held-out ids [N] uint16, memory-mapped, and the tokenizer that made them."""

    tokenizer_file: Path
    train: Tokens
    held_out: Tokens
    facts: dict[str, int | str]


def prepare(folder: Path, vocab_size: int, root: Path | None = None) -> Shards:
    """Build tokenizer.json, train.npy and held_out.npy in `folder`, or open them if they are complete.

    The tokenizer is trained on training files only. `facts` has the numbers of files, characters and tokens of both
    parts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts_file = folder / "facts.json"  # written last: its presence shows that the rest is complete
    if not facts_file.is_file():
        files = standard_library(root)
        parts = {
            "train": [file for file in files if not file.held_out],
            "held_out": [file for file in files if file.held_out],
        }
        tokenizer = train_tokenizer((file.text for file in parts["train"]), vocab_size)
        write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode("utf-8"))
        facts: dict[str, int | str] = {
            "python": sysconfig.get_python_version(),
            "vocab_size": tokenizer.get_vocab_size(),
        }
        for name, part in parts.items():
            ids = encode(tokenizer, part)
            with open(folder / f"{name}.npy", "wb") as file:
                np.save(file, ids)
            facts |= {
                f"{name}_files": len(part),
                f"{name}_characters": sum(len(file.text) for file in part),
                f"{name}_tokens": len(ids),
            }
        write_atomically(facts_file, json.dumps(facts, indent=2).encode())
    return Shards(
        folder / "tokenizer.json",
        np.load(folder / "train.npy", mmap_mode="r"),
        np.load(folder / "held_out.npy", mmap_mode="r"),
        json.loads(facts_file.read_text()),
    )


@dataclass(frozen=True)
class Windows:
    """A source of batches of equally long windows over `tokens`.

    Every epoch covers all windows, in a new order and (if `shifted`) with new cuts. A batch depends on (seed, index)
    alone, so a resumed run gets the same batches as an uninterrupted one.
    """

    tokens: Tokens
    seq_len: int
    batch_size: int
    seed: int
    shifted: bool = True

    def __post_init__(self) -> None:
        if self.batches_per_epoch < 1:
            needed = self.seq_len * (self.batch_size + 1) + 1
            raise ConfigError(
                f"{len(self.tokens)} tokens make no batch of {self.batch_size} x {self.seq_len} "
                f"({needed} needed); use more data or a smaller batch"
            )

    @property
    def batches_per_epoch(self) -> int:
        # one window less than fits, so that the cut can shift by up to a window
        return ((len(self.tokens) - 1) // self.seq_len - 1) // self.batch_size

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and next tokens of batch number `index`, [batch_size, seq_len] int64 each."""
        epoch, place = divmod(index, self.batches_per_epoch)
        rng = np.random.default_rng([self.seed, self.seq_len, epoch])
        shift = int(rng.integers(self.seq_len)) if self.shifted else 0
        order = rng.permutation(self.batches_per_epoch * self.batch_size)
        chosen = order[place * self.batch_size : (place + 1) * self.batch_size]
        rows = [self.tokens[shift + w * self.seq_len : shift + (w + 1) * self.seq_len + 1] for w in chosen]
        block = torch.from_numpy(np.stack(rows).astype(np.int64))
        return block[:, :-1], block[:, 1:]
