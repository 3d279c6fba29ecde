"""Messages while an engine is loaded: each folder is named before it is read.

A message names all models that are read together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import make_target
from tests.head_checkpoints import make_eagle3
from trtspec.build import wiring
from trtspec.build.models import ModelLoader
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"method": "eagle3", "model": "head"}, ["loading target and head", "target"]),
        ({"method": "draft_model", "model": "target"}, ["loading target", "target", "loading target", "draft"]),
        ({"method": "mtp"}, ["loading target", "target"]),
        ({"method": "mtp", "one_engine": False}, ["loading target", "target", "loading target", "draft"]),
        ({"method": "ngram"}, ["loading target", "target"]),
    ],
    ids=str,
)
def test_a_folder_is_named_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], expected: list[str]
) -> None:
    has_modules = fields["method"] == "mtp"
    target = make_target(tmp_path, "mimo" if has_modules else "llama", num_nextn_predict_layers=int(has_modules))
    if fields.get("model") == "head":
        make_eagle3(tmp_path, target, (0, 1), tuple(range(11))).rename(tmp_path / "head")
    seen: list[str] = []
    load = ModelLoader.load

    def noted(self: ModelLoader, context: Any, *others: Any) -> Any:
        seen.append(context.role)
        return load(self, context, *others)

    monkeypatch.setattr(ModelLoader, "load", noted)
    monkeypatch.chdir(tmp_path)
    asked = SpeculativeConfig(**fields, num_speculative_tokens=1)
    config = EngineConfig(max_batch_size=2, max_num_tokens=16, max_seq_len=32)
    wiring.create_engine("target", asked, config, None, seen.append)
    assert seen == expected
