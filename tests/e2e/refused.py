"""Speculation that is refused: checkpoints that fit together, for tests to spoil, and checks of the refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import edit_config
from tests.dspark_checkpoints import make_dspark
from tests.e2e.tiny import MASK, add_tokenizer, make_target
from tests.head_checkpoints import make_dflash, make_eagle, make_eagle3, make_medusa, make_mlp_speculator
from trtspec import LLM
from trtspec.cli import main
from trtspec.errors import TrtSpecError

K2 = {"num_speculative_tokens": 2}


@dataclass
class Folders:
    """Checkpoints that fit together. Tests write others into `tmp`."""

    target: Path
    draft: Path
    wide: Path  # a target of another hidden size
    large: Path  # a target of another vocabulary, with a tokenizer of its own
    mimos: dict[int, Path]  # by number of MTP modules
    tmp: Path

    def copy(self, folder: Path, **fields: Any) -> Path:
        """Copy a checkpoint and change these fields of its config.json."""
        copied = self.tmp / f"copy-of-{folder.name}"
        shutil.copytree(folder, copied)
        edit_config(copied, **fields)
        return copied

    def config_alone(self, **config: Any) -> Path:
        """Write a folder with nothing but a config.json of these fields."""
        folder = self.tmp / "config-alone"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def eagle(self, target: Path | None = None, **options: Any) -> str:
        return str(make_eagle(self.tmp, target or self.target, **options))

    def eagle3(self, target: Path | None = None, **options: Any) -> str:
        return str(make_eagle3(self.tmp, target or self.target, **{"capture": (0, 1), **options}))

    def dflash(self, target: Path | None = None) -> str:
        return str(make_dflash(self.tmp, target or self.target, (0, 1), MASK))

    def dspark(self, target: Path | None = None, **options: Any) -> str:
        return str(make_dspark(self.tmp, target or self.target, (0, 1), MASK, **options))

    def medusa(self, target: Path | None = None, **options: Any) -> str:
        return str(make_medusa(self.tmp, target or self.target, **options))

    def mlp(self, target: Path | None = None, **options: Any) -> str:
        return str(make_mlp_speculator(self.tmp, target or self.target, **options))


@pytest.fixture(scope="session")
def good_folders(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    tmp = tmp_path_factory.mktemp("bad")
    wide = make_target(tmp, name="wide", hidden_size=48, num_attention_heads=6)
    large = make_target(tmp, name="large", vocab_size=24)
    shutil.copyfile(target / "tokenizer.json", large / "tokenizer.json")
    mimos = {n: make_target(tmp, "mimo", name=f"mimo-{n}", num_nextn_predict_layers=n) for n in (1, 2)}
    for folder in mimos.values():
        add_tokenizer(folder)
    return Folders(target, draft, wide, large, mimos, tmp)


@pytest.fixture
def folders(good_folders: Folders, tmp_path: Path) -> Folders:
    return Folders(**{**good_folders.__dict__, "tmp": tmp_path})


Spec = dict[str, Any] | None
Wrong = Callable[[Folders], tuple[Path, Spec]]
"""-> (target, speculative_config)"""


def assert_refused(
    target: Path,
    spec: Spec,
    error: type[TrtSpecError],
    words: tuple[str, ...],
    tmp: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check that LLM raises `error` with `words`, and that `trtspec build` prints the same message.

    It runs `trtspec build` with and without --dry_run. Neither leaves an engine folder.
    """
    with pytest.raises(TrtSpecError) as caught:
        LLM(target, spec)
    said = str(caught.value)
    assert type(caught.value) is error, caught.value
    assert [word for word in words if word not in said] == [], said
    arguments = ["build", "--checkpoint_dir", str(target), "--output_dir", str(tmp / "engine")]
    if spec is not None:
        arguments += ["--spec", json.dumps(spec)]
    for more in ([], ["--dry_run"]):
        capsys.readouterr()
        assert main([*arguments, *more]) == 1
        assert capsys.readouterr().err == f"trtspec: {said}\n"
        assert "\n" not in said
        assert not (tmp / "engine").exists()


KINDS = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator")


def head(folders: Folders, kind: str) -> Path:
    """Write a good checkpoint to draft with into the test's own folder."""
    make = {"eagle": folders.eagle, "eagle3": folders.eagle3, "medusa": folders.medusa, "mlp_speculator": folders.mlp}
    return Path(make[kind]()) if kind in make else folders.copy(folders.draft)
