"""TrainingBatches: an epoch has every window, and the target's states of a window are kept on disk or computed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.e2e.training import make_training_batch
from trtspec.models.decoder import Decoder
from trtspec.train.language_model import initialise, llama_spec
from trtspec.train.states import KeptStates
from trtspec.train.training_batches import TextWindows, TrainingBatches

VOCAB, LAYERS, SEQ = 40, (0, 1), 20


@pytest.fixture(scope="module")
def target() -> Decoder:
    spec = llama_spec(VOCAB, 2, hidden_size=32, intermediate_size=48, head_dim=16, num_heads=2, num_kv_heads=1)
    return initialise(Decoder(spec), seed=0).requires_grad_(False)


def test_an_epoch_is_every_window_and_what_is_kept_is_not_computed_again(target: Decoder, tmp_path: Path) -> None:
    tokens = torch.randint(VOCAB, (7 * SEQ + 3,), generator=torch.Generator().manual_seed(5)).numpy()
    windows = TextWindows(tokens, SEQ)
    asked: list[int] = []
    widths = (2 * target.spec.hidden_size, target.spec.hidden_size)
    kept = KeptStates(tmp_path, "0", 4, SEQ, widths, torch.float32)  # four of the seven
    source = TrainingBatches(windows, target.train(), LAYERS, 3, seed=0, kept=kept)
    first = [source.batch(i) for i in range(4)]
    seen = sorted(tuple(row.tolist()) for one in first[:2] for row in one.inputs)
    assert len(set(seen)) == 6  # two batches of three of seven windows, then the next epoch
    assert kept.num_kept == 4
    layer = target.layers[0].register_forward_pre_hook(lambda module, given: asked.append(len(given[0]) // SEQ))
    again = TrainingBatches(windows, target, LAYERS, 3, 0, KeptStates(tmp_path, "0", 4, SEQ, widths, torch.float32))
    for index, one in enumerate(first):
        for ours, theirs in zip(again.batch(index), one, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    layer.remove()
    assert 0 < sum(asked) <= 3 * 2  # the three that are not kept, in two epochs
    alone = make_training_batch(target, LAYERS, first[0].inputs[1:2])
    torch.testing.assert_close(first[0].captured[1:2], alone.captured, atol=1e-5, rtol=0)
    assert torch.equal(first[0].best[1:2], alone.best)


def test_states_that_are_torn_or_cannot_be_kept_are_computed(
    target: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = (torch.arange(SEQ), torch.randn(SEQ, 6).bfloat16(), torch.randn(SEQ, 3).bfloat16())
    make = partial(KeptStates, tmp_path, "0", 3, SEQ, (6, 3), torch.bfloat16)
    kept = make()
    for index in range(3):
        kept.put(index, states)
    for ours, theirs in zip(make().get(2) or (), states, strict=True):
        assert torch.equal(ours, theirs)
    data = bytearray((tmp_path / "0.bin").read_bytes())
    data[kept.num_bytes + 5] ^= 1  # in the second
    (tmp_path / "0.bin").write_bytes(data[:-1])  # the third loses its last byte
    (tmp_path / "0.crc").write_bytes((tmp_path / "0.crc").read_bytes() + b"torn")
    again = make()
    assert again.get(0) is not None
    assert again.get(1) is again.get(2) is again.get(3) is None

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    again.put(1, states)
    again.put(2, states)
    assert again.get(1) is None
    assert caplog.text.count("No space left on device") == 1
    assert "computes them again in each epoch" in caplog.text
