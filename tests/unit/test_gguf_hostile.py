"""Damaged or malicious files raise a typed error that names the file. Memory stays within bounds of the file's size."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from trtspec.errors import CheckpointError, UnsupportedError
from trtspec.gguf.file import GgufFile
from trtspec.gguf.folder import write_texts
from trtspec.gguf.shard import GgufShard

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(make_checkpoint(folder, "llama", num_hidden_layers=1), folder / "good.gguf", "Q8_0")


def read_all(file: Path, out: Path) -> None:
    opened = GgufFile.open(file)
    out.mkdir(exist_ok=True)
    write_texts(opened, out)
    shard = GgufShard.of(opened)
    for name in shard.slices:
        shard.get_tensor(name)


def header_end(file: Path) -> int:
    return min(entry.offset for entry in GgufFile.open(file).tensors.values())


def test_every_truncation_is_said(good: Path, tmp_path: Path) -> None:
    whole, file = good.read_bytes(), tmp_path / "cut.gguf"
    end = header_end(good)
    for length in [*range(0, end, 7), end, end + 100, len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_all(file, tmp_path / "out")


def test_changed_bytes_give_typed_errors_or_another_model(good: Path, tmp_path: Path) -> None:
    """Files with changed headers load as another model or raise typed errors.

    There are 800 files, from a fixed seed, with 1 to 4 bytes of the header changed.
    """
    whole, file, end = good.read_bytes(), tmp_path / "changed.gguf", header_end(good)
    draw, refused, unnamed = random.Random(0), 0, 0
    tracemalloc.start()
    for _ in range(800):
        changed = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(4, end)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        file.write_bytes(changed)
        try:
            read_all(file, tmp_path / "out")
        except (CheckpointError, UnsupportedError) as error:
            refused, unnamed = refused + 1, unnamed + ("changed.gguf" not in str(error))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > 80
    assert unnamed == 0
    assert peak < 64 * len(whole)


def hostile(path: Path, *parts: bytes, tensors: int = 0, entries: int = 0) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + b"".join(parts) + bytes(256))
    return path


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def array(kind: int, count: int, *parts: bytes) -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + b"".join(parts)


@pytest.mark.parametrize(
    ("parts", "counts", "match"),
    [
        ((), {"tensors": 2**60}, "1152921504606846976 tensors"),
        ((), {"entries": 2**63}, "9223372036854775808 metadata entries"),
        ((text(b"a", 2**62),), {"entries": 1}, "4611686018427387904 bytes of the name"),
        ((text(b"a"), array(0, 2**61)), {"entries": 1}, "2305843009213693952 elements of 'a'"),
        ((text(b"a"), array(8, 2**50)), {"entries": 1}, "elements of 'a'"),
        ((text(b"a"), array(9, 1, array(9, 1))), {"entries": 1}, "'a' has elements of the type 9"),
        ((text(b"a"), struct.pack("<I", 77)), {"entries": 1}, "'a' is of the unknown type 77"),
        ((text(b"\xff\xfe"), struct.pack("<IB", 0, 1)), {"entries": 1}, "is no text"),
        ((text(b"a"), struct.pack("<IB", 0, 1)) * 2, {"entries": 2}, "'a' is there twice"),
        (
            (text(b"general.alignment"), struct.pack("<II", 4, 0)),
            {"entries": 1},
            "general.alignment = 0 is no power of two",
        ),
        ((text(b"t"), struct.pack("<I", 2**31)), {"tensors": 1}, "2147483648 dimensions"),
        ((text(b"t"), struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)), {"tensors": 1}, "tensor 't' ends at byte"),
        ((text(b"t"), struct.pack("<IQIQ", 1, 0, 0, 0)), {"tensors": 1}, r"has the shape \(0,\)"),
        ((text(b"t"), struct.pack("<IQIQ", 1, 33, 8, 0)), {"tensors": 1}, r"Q8_0 has the shape \(33,\)"),
        ((text(b"t"), struct.pack("<IQIQ", 1, 1, 0, 3)), {"tensors": 1}, "begins at 3, no multiple of 32"),
        ((text(b"t"), struct.pack("<IQIQ", 1, 8, 0, 0)) * 2, {"tensors": 2}, "is there twice"),
        (
            (text(b"t"), struct.pack("<IQIQ", 1, 16, 0, 0), text(b"u"), struct.pack("<IQIQ", 1, 4, 0, 32)),
            {"tensors": 2},
            "tensor 'u' begins inside another",
        ),
    ],
)
def test_headers_made_to_harm(tmp_path: Path, parts: tuple[bytes, ...], counts: dict[str, int], match: str) -> None:
    file = hostile(tmp_path / "bad.gguf", *parts, **counts)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=match):
        GgufFile.open(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("name", "values", "kind", "match"),
    [
        ("blk.0.attn_q.bias", np.ones(64, np.float32), "Q8_0", "'blk.0.attn_q.bias' is a vector of Q8_0"),
        ("blk.0.attn_k.bias", np.ones(33, np.float32), "F32", "'blk.0.attn_k.bias' has 33 rows for 2 heads"),
        ("model.norm.weight", np.ones(64, np.float32), "F32", "is there twice, once as model.norm.weight"),
    ],
)
def test_tensors_that_no_converter_writes(tmp_path: Path, name: str, values: np.ndarray, kind: str, match: str) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        wanted = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(values, wanted), raw_dtype=wanted)

    file = write_gguf(make_checkpoint(tmp_path, "llama"), tmp_path / "bad.gguf", extra=add)
    with pytest.raises(CheckpointError, match=match):
        GgufShard.open(file)


def test_kinds_and_versions_that_are_not_read(tmp_path: Path) -> None:
    file = hostile(tmp_path / "bad.gguf", text(b"t"), struct.pack("<IQIQ", 1, 256, 16, 0), tensors=1)
    with pytest.raises(UnsupportedError, match=r"'t' is of kind 16 .*Q4_K, Q5_K, Q6_K"):
        GgufFile.open(file)
    file.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(UnsupportedError, match="big-endian"):
        GgufFile.open(file)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(UnsupportedError, match=r"version 1; supported: .* 2 and 3"):
        GgufFile.open(file)


@pytest.mark.parametrize(
    ("add", "match"),
    [
        (lambda w: w.add_token_list(["a", "a"]), "'tokenizer.ggml.tokens' has a text twice"),
        (lambda w: w.add_token_list(["a"] * 300), "has 300 texts for a model of 199 ids"),
        (lambda w: w.add_string("tokenizer.ggml.tokens", "abc"), "'tokenizer.ggml.tokens' = 'abc' is not a list"),
        (lambda w: (w.add_token_list(["a", "b"]), w.add_token_types([1])), "1 kinds for 2 tokens"),
        (lambda w: (w.add_token_list(["a", "b"]), w.add_token_merges(["a c"])), "'a c', which are no two tokens"),
        (lambda w: (w.add_token_list(["a", "b"]), w.add_token_merges(["ab"])), "'ab', which are no two tokens"),
        (
            lambda w: (w.add_token_list(["a", "b", "ab"]), w.add_token_merges(["a b"]), w.add_bos_token_id(7)),
            "= 7 is not one of",
        ),
    ],
)
def test_tokenizers_that_contradict_themselves(tmp_path: Path, add: object, match: str) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        add(writer)  # type: ignore[operator]

    file = write_gguf(make_checkpoint(tmp_path, "llama"), tmp_path / "bad.gguf", tokenizer=write)
    with pytest.raises(CheckpointError, match=match):
        write_texts(GgufFile.open(file), tmp_path)
