"""Tokenizers of each family, trained on a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from trtspec.text import Tokenizer

CORPUS = [
    "def main(argv): return 0",
    "the quick brown fox jumps over the lazy dog",
    "naïve café, déjà vu, Füße",
    "日本語のテキスト, 中文字符",
    "😀 👩‍👩‍👧 e\u0301 ﷽",
    "if x:\n    y = x + 1\n",
] * 4


def byte_level() -> tokenizers.Tokenizer:
    """A tokenizer of the GPT-2 family (Llama 3, Qwen): tokens are pieces of UTF-8, often not whole characters."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_tokens(["<tool é>"])  # added, but not special
    tok.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return tok


def byte_fallback() -> tokenizers.Tokenizer:
    """A SentencePiece tokenizer as in Llama 2.

    "▁" begins a word, unknown characters are <0xNN> tokens, and the first space is cut.
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    names += [name for name in learnt["vocab"] if name not in names]
    tok = tokenizers.Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(merge) for merge in learnt["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens(["<s>", "</s>"])
    return tok


def with_decoder(decoder: Any) -> Callable[[], tokenizers.Tokenizer]:
    def build() -> tokenizers.Tokenizer:
        tok = byte_fallback()
        tok.decoder = decoder
        return tok

    return build


def word_end() -> tokenizers.Tokenizer:
    """A tokenizer of original BPE: "</w>" ends a word and is a space, except in the last token."""
    tok = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.decoder = decoders.BPEDecoder(suffix="</w>")
    special = ["<unk>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=200, end_of_word_suffix="</w>", special_tokens=special, show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def no_decoder() -> tokenizers.Tokenizer:
    tok = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "[UNK]": 3}, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    return tok


BUILDERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": with_decoder(decoders.Metaspace(prepend_scheme="always")),
    "gemma": with_decoder(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
    "wordpiece": with_decoder(decoders.WordPiece(prefix="▁", cleanup=True)),
    "word_end": word_end,
    "no_decoder": no_decoder,
}
TOKENIZERS = {name: Tokenizer(build()) for name, build in BUILDERS.items()}
