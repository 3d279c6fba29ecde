"""Data that a run learns from and is measured on: text, ids, conversations or shards.

It is prepared once per run and kept in the run's folder.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.text.tokenizer import Tokenizer
from trtspec.train import chat
from trtspec.train.chat import PackedWindows, TaughtText
from trtspec.train.checkpoint import write_atomically
from trtspec.train.data import Tokens, load_tokenizer
from trtspec.train.head import HeadOptions
from trtspec.train.regenerate import Manner, Speaker, answer_chats, forget
from trtspec.train.shards import shard_files
from trtspec.train.training_batches import TextWindows, Windows

logger = logging.getLogger(__name__)

PROMPT_LEN = 64
"""Tokens of a prompt that is cut from the data for the target to continue."""

_HELD_OUT = 64
"""Most prompts on which a head is measured."""

_MADE_ONCE = ("tokens.npy", "regenerated.npy", "conversations.npy", "held_out.json", "shards.json")
"""Files of a run with the data prepared for it."""

_PIECES = "regenerate"
"""Folder of a run: the target's outputs so far, until all are generated."""


@dataclass(frozen=True)
class Material:
    """A run's data.

    said: ids [N] like those that the head will predict. held_out: texts of the target; for each its ids and the number
    of them that are the prompt.
    """

    windows: tuple[Windows, ...]
    said: Tokens
    held_out: list[tuple[list[int], int]]


def material_of(options: HeadOptions, config: ModelConfig) -> Material:
    """Prepare, or read again, the data of a run on text, ids or conversations.

    ConfigError or CheckpointError if the data cannot be used.
    """
    chats = [path for path in options.data if path.suffix == chat.SUFFIX]
    if chats and len(chats) < len(options.data):
        other = next(path for path in options.data if path not in chats)
        raise ConfigError(f"data: {other} holds no conversations, {chats[0]} does; train on one kind")
    prompts = held_out_prompts(options, config.vocab_size)  # raises for bad held-out data before the work
    with speaker_of(options) as speaker:
        windows, said = _conversations(options, config, speaker) if chats else _texts(options, config, speaker)
        held_out = held_out_texts(options, prompts, speaker)
    forget(options.run / _PIECES)  # the outputs are in files of their own now
    return Material(windows, said, held_out)


def forget_data(run: Path) -> None:
    """Delete the prepared data of a run, so that it is made again when it is next needed."""
    for name in _MADE_ONCE:
        (run / name).unlink(missing_ok=True)
    forget(run / _PIECES)


def read_shard_files(options: HeadOptions) -> list[Path]:
    """Return the shards of hidden states in `data`; [] if `data` is text.

    The shards are listed once per run, because the folder may be growing.
    """
    listing = options.run / "shards.json"
    if listing.is_file():
        return [Path(name) for name in json.loads(listing.read_text())]
    files = shard_files(options.data)
    if files:
        write_atomically(listing, json.dumps([str(file) for file in files]).encode())
    return files


def held_out_texts(options: HeadOptions, prompts: list[list[int]], speaker: Speaker) -> list[tuple[list[int], int]]:
    """Return the prompts of `held_out_prompts` with the target's greedy outputs; each text has its prompt's length."""
    if not prompts:
        return []
    file = options.run / "held_out.json"
    texts: list[tuple[list[int], int]] = json.loads(file.read_text()) if file.is_file() else []
    if [ids[:size] for ids, size in texts] != prompts:  # held_out may have changed
        assert options.held_out is not None
        manner = Manner(ignore_eos=options.held_out.suffix != chat.SUFFIX)
        room = [min(options.regenerate_len, speaker.max_seq_len - len(prompt)) for prompt in prompts]
        words = speaker.say("held out", prompts, [manner.params(size) for size in room])
        texts = [([*prompt, *one.ids], len(prompt)) for prompt, one in zip(prompts, words, strict=True)]
        write_atomically(file, json.dumps(texts).encode())
    return texts


def held_out_prompts(options: HeadOptions, vocab_size: int) -> list[list[int]]:
    """Return at most 64 prompts spread over the held-out data; [] without such data."""
    if options.held_out is None:
        return []
    is_chat = options.held_out.suffix == chat.SUFFIX
    return _first_turns(options) if is_chat else _cut_prompts(options, vocab_size)


def speaker_of(options: HeadOptions) -> Speaker:
    """Return the target's Speaker, for the longest texts that this run needs."""
    longest = max(options.seq_len, PROMPT_LEN + options.regenerate_len)
    return Speaker(options.target, options.run / _PIECES, longest)


def read_tokens(options: HeadOptions, vocab_size: int) -> Tokens:
    """Return all data as one row of ids [N], made once per run. The target's tokenizer encodes text."""
    shard = options.run / "tokens.npy"
    if not shard.is_file():
        parts = [_tokens_of(path, options.target, vocab_size) for path in options.data]
        _save(shard, np.concatenate(parts))
    tokens: Tokens = np.load(shard, mmap_mode="r")
    return tokens


def _texts(options: HeadOptions, config: ModelConfig, speaker: Speaker) -> tuple[tuple[Windows, ...], Tokens]:
    tokens = read_tokens(options, config.vocab_size)
    windows = TextWindows(tokens, options.seq_len)
    if not options.regenerate:
        return (windows,), tokens
    words = _continuations(options, tokens, speaker)
    own = words.reshape(-1)
    return (windows, TextWindows(own, words.shape[1])), own


def _continuations(options: HeadOptions, tokens: Tokens, speaker: Speaker) -> Tokens:
    """Return prompts cut from the data with the target's outputs after them, [count, length]; made once.

    Prompts have 64 tokens, or seq_len if that is less. They begin as the tokenizer begins texts.
    """
    file = options.run / "regenerated.npy"
    if not file.is_file():
        prompt_len = min(PROMPT_LEN, options.seq_len)
        count = min(options.regenerate, len(tokens) // prompt_len)
        if count < options.batch_size:
            raise ConfigError(
                f"{len(tokens)} tokens of data make {count} prompts of {prompt_len} for regenerate, less than "
                f"batch_size={options.batch_size}; use more data, or regenerate=0"
            )
        rng = np.random.default_rng([options.seed, prompt_len])
        chosen = rng.permutation(len(tokens) // prompt_len)[:count]
        opening = _opening(options.target)
        length = prompt_len - len(opening)
        prompts = [[*opening, *tokens[start * prompt_len :][:length].tolist()] for start in chosen]
        manner = Manner(options.regenerate_temperature, options.seed, ignore_eos=True)
        words = speaker.say("texts", prompts, [manner.params(options.regenerate_len, i) for i in range(count)])
        rows = [[*prompt, *one.ids] for prompt, one in zip(prompts, words, strict=True)]
        _save(file, np.asarray(rows, dtype=np.uint32))
    own: Tokens = np.load(file, mmap_mode="r")
    return own


def _conversations(options: HeadOptions, config: ModelConfig, speaker: Speaker) -> tuple[tuple[Windows, ...], Tokens]:
    file = options.run / "conversations.npy"
    if not file.is_file():
        tokenizer = _chat_tokenizer(options.target)
        chats = [one for path in options.data for one in chat.read_chats(path)]
        texts: list[TaughtText]
        if options.regenerate:
            chosen = np.random.default_rng(options.seed).permutation(len(chats))[: options.regenerate]
            manner = Manner(options.regenerate_temperature, options.seed)
            own = [chats[i] for i in sorted(chosen)]
            texts = answer_chats(speaker, own, tokenizer, options.seq_len, options.regenerate_len, manner)
        else:
            texts = [text for one in chats for text in chat.taught_texts(one, tokenizer, _ends(config, tokenizer))]
        if not texts:
            raise ConfigError("data: the conversations have no answers to learn from; use others, or regenerate")
        rows, lost = chat.pack(texts, options.seq_len)
        if lost:
            total = sum(sum(text.is_answer) for text in texts)
            logger.warning(
                "%d of %d tokens of answers lie beyond seq_len=%d and are not used; raise it to use them",
                lost, total, options.seq_len,
            )  # fmt: skip
        _save(file, rows)
    windows = PackedWindows(np.load(file, mmap_mode="r"))
    answers = windows.answers()
    if not len(answers):
        raise ConfigError(f"data: no answer begins within seq_len={options.seq_len} tokens; raise it")
    if int(answers.max()) >= config.vocab_size:
        raise CheckpointError(f"{options.target}: its tokenizer has ids that its vocabulary has not; fix the folder")
    return (windows,), answers


def _ends(config: ModelConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end the target's turns, the tokenizer's own first."""
    own = tokenizer.eos_token_id
    return [*([] if own is None else [own]), *(token for token in sorted(config.eos_token_ids) if token != own)]


def _first_turns(options: HeadOptions) -> list[list[int]]:
    """Return the prompts of held-out conversations: the messages up to the first answer."""
    assert options.held_out is not None
    tokenizer, chats = _chat_tokenizer(options.target), chat.read_chats(options.held_out)
    first = [part for one in chats for part in [next(chat.turns(one), None)] if part]
    prompts = [chat.encode(tokenizer, part, to_come=True) for part in first]
    fitting = [prompt for prompt in prompts if len(prompt) + options.unroll + 2 <= options.seq_len]
    if not fitting:
        raise ConfigError(
            f"held_out={options.held_out}: no conversation begins within seq_len={options.seq_len} tokens; raise it"
        )
    return [fitting[i] for i in np.linspace(0, len(fitting) - 1, min(_HELD_OUT, len(fitting))).astype(int)]


def _cut_prompts(options: HeadOptions, vocab_size: int) -> list[list[int]]:
    """Return prompts of 64 tokens each, cut from held-out text, which begin as the tokenizer begins texts."""
    assert options.held_out is not None
    tokens = _tokens_of(options.held_out, options.target, vocab_size)
    count = min(_HELD_OUT, len(tokens) // PROMPT_LEN)
    if count < 1:
        raise ConfigError(
            f"held_out={options.held_out} holds {len(tokens)} tokens, less than one prompt of {PROMPT_LEN}; use more"
        )
    starts = np.linspace(0, len(tokens) - PROMPT_LEN, count).astype(int)
    opening = _opening(options.target)
    length = PROMPT_LEN - len(opening)
    return [[*opening, *tokens[start : start + length].tolist()] for start in starts]


def _opening(target: Path) -> list[int]:
    """Return the ids that the target's tokenizer puts before every text, such as BOS; none without a tokenizer."""
    tokenizer = Tokenizer.from_folder(target)
    if tokenizer is None:
        return []
    whole, text = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return whole[: next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)]


def _chat_tokenizer(target: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(target)
    if tokenizer is None or not tokenizer.chat_templates:
        raise ConfigError(f"{target} has no chat template to read conversations with; pass text, or .npy of token ids")
    return tokenizer


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


def _save(path: Path, rows: npt.NDArray[Any]) -> None:
    """Write the whole file or nothing."""
    partial = path.with_suffix(".tmp.npy")
    np.save(partial, rows)
    partial.replace(path)
