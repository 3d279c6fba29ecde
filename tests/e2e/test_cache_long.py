"""The cache with engines that take longer to compile: draft layers inside graphs, a disk that fills up meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conformance import make_models
from tests.e2e.tiny import add_tokenizer, make_target
from trtspec import LLM, SamplingParams
from trtspec.build import start as starting
from trtspec.build.build import build_engine
from trtspec.build.cache import Cache
from trtspec.errors import CapacityError

LIMITS = {"max_batch_size": 4, "num_kv_blocks": 64}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 1], [2, 2]]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The engines that this process compiles into a cache of its own."""
    made: list[Path] = []

    def counted(checkpoint: Path, output: Path, *rest: Any, **options: Any) -> None:
        made.append(output)
        build_engine(checkpoint, output, *rest, **options)

    monkeypatch.setattr(starting, "build_engine", counted)
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    return made


def outputs(model: Path, speculation: dict[str, Any] | None = None, **options: Any) -> list[list[int]]:
    with LLM(model, speculation, **LIMITS, **options) as llm:
        return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.long
@pytest.mark.parametrize("one_engine", [True, False])
def test_what_graphs_do_not_know_of_speculation_is_heeded_at_run_time(
    tmp_path: Path, built: list[Path], one_engine: bool
) -> None:
    models = make_models(tmp_path)
    head = {"method": "eagle3", "model": str(models / "head"), "one_engine": one_engine}
    wanted = outputs(models / "target", backend="eager")
    assert outputs(models / "target", {**head, "num_speculative_tokens": 2}) == wanted
    for extra in ({"max_model_len": 100}, {"disable_logprobs": True}):
        assert outputs(models / "target", {**head, "num_speculative_tokens": 2, **extra}) == wanted
    assert len(built) == 1
    assert outputs(models / "target", {**head, "num_speculative_tokens": 1}) == wanted
    assert len(built) == 2


@pytest.mark.long
def test_hidden_states_go_where_each_start_says(tmp_path: Path, built: list[Path]) -> None:
    models = make_models(tmp_path)
    for name in ("one", "two"):
        saving = {"method": "extract_hidden_states", "output_directory": str(tmp_path / name)}
        outputs(models / "target", {**saving, "capture_layers": [0]})
        assert [*(tmp_path / name).glob("*.safetensors")]
    assert len(built) == 1


class _Filling(logging.Handler):
    """A log handler that fills the disk of `folder` when weights are about to be written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.DEBUG)
        self.folder, self.times = folder, 0

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() != "target: writing weights":
            return
        self.times += 1
        with (self.folder / f"filling-{self.times}").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass


@pytest.fixture
def filling(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Filling]:
    logger, handler = logging.getLogger("trtspec.llm"), _Filling(small_disk)
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.long
@pytest.mark.parametrize("small_disk", ["256m"], indirect=True)
def test_a_disk_that_fills_up_meanwhile(
    tmp_path: Path,
    small_disk: Path,
    filling: _Filling,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_target(tmp_path, num_hidden_layers=1)
    add_tokenizer(model)
    wanted = outputs(model)
    folder = small_disk / "cache"
    monkeypatch.setenv("TRTSPEC_CACHE", str(folder))
    with pytest.raises(CapacityError, match=r"the disk of .* is full; make room"):
        outputs(model, backend="aoti")
    (small_disk / "filling-1").unlink()
    assert outputs(model) == wanted
    assert filling.times == 2
    assert [record.levelname for record in caplog.records if "is full; make room" in record.message] == ["WARNING"]
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert Cache(folder, 1).kept() == []
