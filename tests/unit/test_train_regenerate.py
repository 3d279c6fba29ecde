"""The target's own words by its engine: those of plain greedy decoding, and nothing twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from trtspec import LLM
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.models.weights import load_decoder
from trtspec.train.generate import continue_windows
from trtspec.train.regenerate import forget, regenerate


class Killed(Exception):
    pass


def test_words_are_greedy_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the second piece of three, it goes on with the third."""
    monkeypatch.setattr("trtspec.train.regenerate._PIECE", 2)
    model = make_checkpoint(tmp_path, "llama")
    prompts = torch.randint(3, 199, (5, 8), generator=torch.Generator().manual_seed(0))
    expected = continue_windows(load_decoder(ModelConfig.from_folder(model), torch.float32).train(), prompts, 12)
    asked: list[int] = []
    generate = LLM.generate

    def watched(self: LLM, some: list[list[int]], *arguments: object, **options: object) -> object:
        if len(asked) == 2:
            asked.append(0)
            raise Killed
        asked.append(len(some))
        return generate(self, some, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "generate", watched)
    with pytest.raises(Killed):
        regenerate(model, prompts, 12, tmp_path / "pieces")
    words = regenerate(model, prompts, 12, tmp_path / "pieces")
    assert asked == [2, 2, 0, 1]
    assert words.dtype == np.uint16
    assert words.reshape(-1).tolist() == expected.tolist()
    forget(tmp_path / "pieces")
    assert not (tmp_path / "pieces").exists()
