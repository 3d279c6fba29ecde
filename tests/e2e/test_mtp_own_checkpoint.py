"""MTP layers from a checkpoint of their own make the same drafts as the same layers inside the target's checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints import edit_config, edit_tensors
from tests.e2e.head_cases import PLAIN, ROOMY, TIGHT, assert_right, refer, run_watched
from tests.e2e.tiny import add_tokenizer, draw_cases, make_target, run_together
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.errors import CheckpointError, ConfigError, UnsupportedError, WeightsError
from trtspec.interop.reading import read_speculative_config

pytestmark = pytest.mark.filterwarnings("ignore:.*runs one MTP layer")
CASES = draw_cases(8, seed=41, most_prompt=40)
WAYS: dict[str, dict[str, Any]] = {
    "MTP_EAGLE_ONE_MODEL": {"vanilla": False, "num_speculative_tokens": 3},
    "MTP_EAGLE": {"one_engine": False, "num_speculative_tokens": 2},
    "MTP": {"num_speculative_tokens": 2},
}


class Folders:
    """A MiMo with modules, the same without modules, and its modules alone.

    There are two modules, or one for the modes that run one.
    """

    def __init__(self, root: Path, modules: int) -> None:
        self.whole = make_target(root, "mimo", "whole", num_nextn_predict_layers=modules)
        add_tokenizer(self.whole)
        self.bare, self.alone = (Path(shutil.copytree(self.whole, root / name)) for name in ("bare", "alone"))
        edit_config(self.bare, num_nextn_predict_layers=0)
        self.keep(self.bare, False)
        self.keep(self.alone, True)
        (self.alone / "tokenizer.json").unlink()

    @staticmethod
    def keep(folder: Path, modules: bool) -> None:
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if ("mtp_layers" in name) == modules}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Folders]:
    made = {modules: Folders(tmp_path_factory.mktemp("own"), modules) for modules in (1, 2)}
    return lambda modules: made[modules]


def mtp(model: Path | None, **fields: Any) -> dict[str, Any]:
    return {"method": "mtp", **({} if model is None else {"model": str(model)}), **fields}


@pytest.mark.parametrize("own", ["alone", "whole"])
@pytest.mark.parametrize("mode", WAYS)
def test_drafts_are_those_of_layers_inside(folders: Callable[[int], Folders], mode: str, own: str) -> None:
    """Drafts are those of layers inside the target's checkpoint.

    The target has no modules. The other folder has the modules alone, or all weights of a model.
    """
    found, fields, seen = folders(2 if mode == "MTP" else 1), WAYS[mode], []
    for target, model in ((found.whole, None), (found.bare, getattr(found, own))):
        with LLM(target, mtp(model, **fields), max_batch_size=4, **ROOMY) as llm:
            assert llm.engine.loop.input_builder.mode.name == mode
            run, watched = run_watched(llm, CASES)
            seen.append((watched.given, run.outcomes))
    assert len(seen[0][0]) > 50
    assert seen[1] == seen[0]


def test_lossless(folders: Callable[[int], Folders]) -> None:
    """Speculation changes nothing in a cache too small for all, with drafts right and wrong at every position."""
    found = folders(2)

    def make(**options: Any) -> LLM:
        return LLM(found.bare, mtp(found.alone, num_speculative_tokens=2), **options)

    expected = refer(found.bare, lambda: make(**PLAIN), CASES)
    with make(max_batch_size=8, **TIGHT) as llm:
        run = assert_right(llm, expected, told=True)
        assert llm.engine.stats.preemptions > 0
    assert all(0 < share < 1 for share in run.speculation.acceptance_per_position)


def test_what_a_folder_is_says_the_method(folders: Callable[[int], Folders]) -> None:
    with LLM(folders(1).bare, {"model": str(folders(1).alone), "num_speculative_tokens": 1}) as llm:
        assert llm.engine.loop.input_builder.mode.name == "MTP_EAGLE_ONE_MODEL"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["MTP_EAGLE_ONE_MODEL", "MTP_EAGLE"])
def test_an_engine_has_all_it_needs(folders: Callable[[int], Folders], tmp_path: Path, mode: str) -> None:
    """An engine has all it needs, even when the folders that it was built from are gone."""
    found, limits = folders(1), {"max_batch_size": 4, "max_num_tokens": 32, "block_size": 4}
    gone = [Path(shutil.copytree(one, tmp_path / one.name)) for one in (found.bare, found.alone)]
    fields = {**WAYS[mode], "num_speculative_tokens": 2}
    wanted = read_speculative_config(mtp(gone[1], **fields))
    build_engine(gone[0], tmp_path / "engine", wanted, EngineConfig(backend="onnx", **limits))
    for folder in gone:
        shutil.rmtree(folder)
    runs = []
    for model, speculative in ((tmp_path / "engine", None), (found.whole, mtp(None, **fields))):
        with LLM(model, speculative, num_kv_blocks=41, **({} if speculative is None else limits)) as llm:
            runs.append(run_together(llm.engine, CASES))
    assert runs[0].outcomes == runs[1].outcomes
    assert runs[0].speculation == runs[1].speculation


Spoil = Callable[[Path], object]
BAD: dict[str, tuple[Spoil, type[Exception], tuple[str, ...]]] = {
    "another size": (
        lambda own: edit_config(own, hidden_size=64),
        WeightsError,
        ("was made for another target: its hidden_size is 64, the target's is 32", "trained for this target"),
    ),
    "another vocabulary": (
        lambda own: edit_config(own, vocab_size=17),
        WeightsError,
        ("its vocab_size is 17, the target's is 16",),
    ),
    "another family": (
        lambda own: edit_config(own, model_type="deepseek_v3"),
        UnsupportedError,
        ("MTP layers of model_type='deepseek_v3'", "those of mimo run"),
    ),
    "no layers": (
        lambda own: edit_config(own, num_nextn_predict_layers=0),
        ConfigError,
        ("own/config.json, so there are no MTP layers in that folder", "use a checkpoint that has them"),
    ),
    "a negative number of layers": (
        lambda own: edit_config(own, num_nextn_predict_layers=-1),
        CheckpointError,
        ("method='mtp': num_nextn_predict_layers = -1", "own/config.json is no number of layers; correct it"),
    ),
    "a tensor is missing": (
        lambda own: edit_tensors(own, lambda tensors: tensors.pop("model.mtp_layers.0.input_proj.weight")),
        WeightsError,
        ("model.mtp_layers.0.input_proj.weight", "missing"),
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_an_error_that_helps(folders: Callable[[int], Folders], tmp_path: Path, what: str) -> None:
    spoil, error, words = BAD[what]
    own = Path(shutil.copytree(folders(1).alone, tmp_path / "own"))
    spoil(own)
    with pytest.raises(error) as caught:
        LLM(folders(1).bare, mtp(own, num_speculative_tokens=1))
    assert not [word for word in words if word not in str(caught.value)], caught.value


def test_layers_of_another_family_than_the_target(folders: Callable[[int], Folders], target: Path) -> None:
    with pytest.raises(ConfigError, match=r"for model_type='mimo', and this target is of model_type='llama'; use MTP"):
        LLM(target, mtp(folders(1).alone, num_speculative_tokens=1))
