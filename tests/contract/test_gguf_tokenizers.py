"""The tokenizers of GGUF files against llama.cpp's: 1,000 odd texts for each way of splitting them.

`make contract-smollm2` sets TRTSPEC_SMOLLM2 to a file, whose vocabulary the other tests use. It sets LLAMA_PYTHON to a
Python with llama-cpp-python. Without them all tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.contract.odd_texts import PIECES, odd_texts
from trtspec.gguf.file import GgufFile
from trtspec.gguf.metadata import MetadataReader
from trtspec.gguf.tokenizer import PRE_TOKENIZERS, hf_tokenizer

FILE, LLAMA = os.environ.get("TRTSPEC_SMOLLM2", ""), os.environ.get("LLAMA_PYTHON", "")
pytestmark = pytest.mark.skipif(not (FILE and LLAMA), reason="needs what `make contract-smollm2` gets")
ROOT = Path(__file__).parents[2]


def differences(file: Path, special: tuple[str, ...]) -> list[tuple[str, list[int], list[int]]]:
    """Return the texts whose ids are not llama.cpp's, each with trtspec's ids and llama.cpp's."""
    found = hf_tokenizer(MetadataReader(GgufFile.open(file), "target"), 1 << 20)
    assert found is not None
    tokenizer, texts = Tokenizer.from_str(found[0]), odd_texts(1000, special)
    command = [LLAMA, str(Path(__file__).with_name("llama_ids.py")), str(file)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
    pairs = zip(texts, (tokenizer.encode(text).ids for text in texts), json.loads(done.stdout), strict=True)
    return [pair for pair in pairs if pair[1] != pair[2]]


def vocabulary(file: Path, size: int, add: Callable[[gguf.GGUFWriter], None]) -> Path:
    """Write a file that has a tokenizer and no tensors."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_the_file_as_it_is() -> None:
    assert differences(Path(FILE), ("<|im_start|>", "<|im_end|>")) == []


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_pairs(tmp_path: Path, pre: str) -> None:
    theirs = GgufFile.open(Path(FILE)).metadata
    tokens = theirs["tokenizer.ggml.tokens"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(theirs["tokenizer.ggml.token_type"].tolist())
        writer.add_token_merges(theirs["tokenizer.ggml.merges"])

    file = vocabulary(tmp_path / "model.gguf", len(tokens), add)
    assert differences(file, ("<|im_start|>", "<|im_end|>")) == []


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    """Ids are llama.cpp's for a vocabulary learnt from this project's sources and the odd texts themselves."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    corpus = [file.read_text() for file in sorted((ROOT / "trtspec").rglob("*.py"))]
    learner.train_from_iterator(
        [*corpus, *[" ".join(PIECES)] * 3], trainers.BpeTrainer(vocab_size=3000, show_progress=False)
    )
    model = json.loads(learner.to_str())["model"]
    pieces = dict.fromkeys([*map("".join, model["merges"]), *(one for one in model["vocab"] if len(one) == 1)])
    pieces.pop("\x00", None)  # llama.cpp ends a piece there
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|tool|>"]
    rest = len(tokens) - 260

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * rest, 4])
        writer.add_token_scores([*[0.0] * 259, *(-float(i) for i in range(rest)), 0.0])
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(prefix)

    file = vocabulary(tmp_path / "model.gguf", len(tokens), add)
    assert differences(file, ("</s>", "<|tool|>")) == []
