"""One thread for every test: the models are tiny, and two pools of threads on few cores only wait for each other."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
