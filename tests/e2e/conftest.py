"""The target and its draft, written once for all whole-engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cached import small_disk, warm  # noqa: F401  (fixtures)
from tests.e2e.recorded import recorders  # noqa: F401  (a fixture)
from tests.e2e.refused import folders, good_folders  # noqa: F401  (fixtures)
from tests.e2e.tiny import add_tokenizer, make_target, perturbed


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of Llama's architecture, with 16 ids and a tokenizer."""
    folder = make_target(tmp_path_factory.mktemp("e2e"))
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def draft(target: Path) -> Path:
    """The target with noise in its weights: it agrees with the target often, but not always."""
    return perturbed(target, noise=0.15)
