"""Every mode on a GPU: outputs are plain decoding's, whoever drafts. `make contract` on a GPU runs the other K."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.modes import RECIPES, Models, check
from tests.gpu import engines
from tests.gpu.engines import WIDE
from trtspec import LLM, SamplingParams
from trtspec.backends.cuda import aoti
from trtspec.backends.table import BACKENDS
from trtspec.errors import UnsupportedError
from trtspec.modes import SpeculativeDecodingMode as M

pytestmark = pytest.mark.gpu

K = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("modes"))


@pytest.mark.filterwarnings("ignore:.*runs one MTP layer")
@pytest.mark.parametrize("mode", [mode for mode in RECIPES if BACKENDS["cuda"].lists(mode)], ids=lambda mode: mode.name)
def test_speculation_changes_nothing_and_nothing_is_lost(made: Models, mode: M) -> None:
    cell = check(made, mode, K, "cuda")
    assert cell.verdict == "holds"
    assert cell.acceptance_length > 1


def test_saved_states_are_eager_s(models: Path, tmp_path: Path) -> None:
    saved = {}
    for backend in ("eager", "cuda"):
        fields = {"method": "extract_hidden_states", "output_directory": str(tmp_path / backend), "capture_layers": [1]}
        with LLM(models / "target", fields, backend=backend, dtype="float32", **WIDE) as llm:
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        (shard,) = (tmp_path / backend).glob("*.safetensors")
        saved[backend] = load_file(shard)
    assert saved["eager"].keys() == saved["cuda"].keys()
    for name, tensor in saved["eager"].items():
        torch.testing.assert_close(saved["cuda"][name], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", engines.TREES)
@pytest.mark.parametrize("mode", ["eagle3", "eagle"])
def test_draft_trees(models: Path, mode: str, shape: str, dtype: str) -> None:
    engines.check_trees_change_nothing(models, mode, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_folders(models: Path, tmp_path: Path, dtype: str) -> None:
    try:
        aoti.require()
    except UnsupportedError as error:
        pytest.skip(str(error))
    engines.check_engine_folders(models, tmp_path, dtype)
