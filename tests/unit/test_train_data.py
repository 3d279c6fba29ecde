"""The corpus: its content, the part that is held out, and tokens that are the text and nothing else."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from trtspec.errors import CheckpointError, ConfigError
from trtspec.train.data import (
    END_OF_TEXT,
    MAX_FILE_BYTES,
    SourceFile,
    Windows,
    encode,
    load_tokenizer,
    prepare,
    standard_library,
    train_tokenizer,
)

CODE = "def f(self, x):\n        if x is None:\n            return [i for i in range(10)]\n\n\nclass A:\n    pass\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([CODE * 20], vocab_size=300)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    (root / "encodings").mkdir(parents=True)
    (root / "site-packages" / "other").mkdir(parents=True)
    for i in range(60):
        (root / f"module_{i}.py").write_text(f"{CODE}\nNUMBER = {i}\n")
    (root / "encodings" / "cp1.py").write_text("table = 1\n")
    (root / "site-packages" / "other" / "a.py").write_text("import other\n")
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (root / "huge.py").write_text("x" * (MAX_FILE_BYTES + 1))
    (root / "empty.py").write_text("")
    (root / "copy.py").write_text(f"{CODE}\nNUMBER = 0\n")
    return root


def test_corpus_leaves_out_what_its_docstring_says(library: Path) -> None:
    names = [file.name for file in standard_library(library)]
    # copy.py sorts before module_0.py, so of the two equal files it is the one that stays
    assert names == sorted(["copy.py", *(f"module_{i}.py" for i in range(1, 60))])


def test_corpus_without_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Python source"):
        standard_library(tmp_path)


def test_split_depends_on_the_name_alone_and_takes_a_tenth() -> None:
    names = [f"package/module_{i}.py" for i in range(4000)]
    held = {name for name in names if SourceFile(name, "a").held_out}
    assert held == {name for name in reversed(names) if SourceFile(name, "other text").held_out}
    assert 0.08 < len(held) / len(names) < 0.12
    assert SourceFile("abc.py", "").held_out == SourceFile("abc.py", "x").held_out


def test_this_machine_has_a_library_with_both_parts() -> None:
    held = [file.held_out for file in standard_library(Path(sysconfig.get_paths()["stdlib"]) / "asyncio")]
    assert any(held)
    assert not all(held)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace(END_OF_TEXT, "")
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@settings(max_examples=100, deadline=None)
@given(st.binary())
def test_tokenizer_knows_every_byte(tokenizer: Tokenizer, data: bytes) -> None:
    text = data.decode("utf-8", errors="replace")
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_line_break_and_indentation_are_one_token(tokenizer: Tokenizer) -> None:
    assert "ĊĠĠĠĠĠĠĠ" in tokenizer.encode(CODE).tokens
    assert tokenizer.token_to_id(END_OF_TEXT) == 0


def test_files_are_separated_and_nothing_else_is_added(tokenizer: Tokenizer) -> None:
    texts = ["a = 1\n", "", "b = 'é'\n"]
    ids = encode(tokenizer, [SourceFile("x.py", text) for text in texts])
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == END_OF_TEXT + "".join(
        text + END_OF_TEXT for text in texts
    )


def test_encoding_refuses_a_foreign_tokenizer() -> None:
    from tokenizers import models

    with pytest.raises(CheckpointError, match="endoftext"):
        encode(Tokenizer(models.BPE()), [])


def test_prepare_keeps_the_parts_apart_and_is_done_once(library: Path, tmp_path: Path) -> None:
    shards = prepare(tmp_path / "data", vocab_size=300, root=library)
    tokenizer = load_tokenizer(shards.tokenizer_file)
    files = standard_library(library)
    for part, held_out in ((shards.train, False), (shards.held_out, True)):
        texts = tokenizer.decode(part.tolist(), skip_special_tokens=False).split(END_OF_TEXT)
        assert texts == ["", *(file.text for file in files if file.held_out == held_out), ""]
        assert len(texts) > 2
    (library / "module_1.py").write_text("changed = True\n")
    again = prepare(tmp_path / "data", vocab_size=300, root=library)
    assert np.array_equal(again.train, shards.train)
    assert again.facts == shards.facts


def test_damaged_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_an_epoch_sees_every_window_once_and_the_next_another_order() -> None:
    windows = Windows(np.arange(1000, dtype=np.uint16), seq_len=10, batch_size=7, seed=3)
    epochs = []
    for epoch in range(2):
        batches = [windows.batch(epoch * windows.batches_per_epoch + i) for i in range(windows.batches_per_epoch)]
        for inputs, targets in batches:
            assert (targets == inputs + 1).all()
        starts = [int(row[0]) for inputs, _ in batches for row in inputs]
        assert len({start % 10 for start in starts}) == 1  # one cut per epoch
        assert len(set(starts)) == len(starts) == windows.batches_per_epoch * 7
        epochs.append(starts)
    assert epochs[0] != epochs[1]
    assert windows.batch(5)[0].equal(Windows(windows.tokens, 10, 7, seed=3).batch(5)[0])
    assert not windows.batch(5)[0].equal(Windows(windows.tokens, 10, 7, seed=4).batch(5)[0])


def test_unshifted_windows_begin_at_multiples() -> None:
    windows = Windows(np.arange(1000, dtype=np.uint16), seq_len=10, batch_size=7, seed=3, shifted=False)
    assert (windows.batch(0)[0][:, 0] % 10 == 0).all()


def test_too_little_data_is_an_error() -> None:
    with pytest.raises(ConfigError, match="use more data"):
        Windows(np.arange(20, dtype=np.uint16), seq_len=10, batch_size=2, seed=0)
