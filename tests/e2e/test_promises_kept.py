"""Settings that no code used to read, in engines that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.async_stand_in import HostQueue
from tests.e2e.tiny import make_target
from tests.head_checkpoints import make_eagle3
from trtspec import LLM, SamplingParams
from trtspec.errors import RequestError

LIMITS: dict[str, Any] = {"max_batch_size": 2, "max_num_tokens": 16, "max_seq_len": 48, "num_kv_blocks": 20}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and an EAGLE3 head."""
    root = tmp_path_factory.mktemp("promises")
    target = make_target(root, num_hidden_layers=3)
    return target, make_eagle3(root, target, (0, 1), (0, 9, 4, 12, 1, 2, 14, 5, 6, 11, 8, 3, 7))


def speculation(models: tuple[Path, Path], **more: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(models[1]), "num_speculative_tokens": 2} | more


@pytest.mark.parametrize("inside", [True, False])
def test_enforce_eager_captures_no_graph_of_drafts(models: tuple[Path, Path], work: HostQueue, inside: bool) -> None:
    """enforce_eager captures no graph of drafts. A target with a draft model next to it keeps its own graphs."""
    captured, ids = {}, {}
    two_engine = {"method": "draft_model", "model": str(models[0])}
    for eager in (False, True):
        before = work.num_captured
        asked = speculation(models, enforce_eager=eager, **({} if inside else two_engine))
        with LLM(models[0], asked, backend="cuda", **LIMITS) as llm:
            ids[eager] = [list(one.outputs[0].token_ids) for one in llm.generate([[1, 2, 3], [4, 5]], PARAMS)]
        captured[eager] = work.num_captured - before
    assert ids[True] == ids[False]
    assert captured[False] > captured[True]
    assert (captured[True] == 0) == inside


@pytest.mark.parametrize("disabled", [None, False, True])
def test_disable_logprobs_refuses_those_who_ask(models: tuple[Path, Path], disabled: bool | None) -> None:
    more = {} if disabled is None else {"disable_logprobs": disabled}
    with LLM(models[0], speculation(models, **more), **LIMITS) as llm:
        asking = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1)
        if disabled:
            with pytest.raises(RequestError, match="logprobs = 1: this engine speculates with disable_logprobs=True"):
                llm.generate([[1, 2, 3]], asking)
            assert llm.generate([[1, 2, 3]], PARAMS)[0].outputs[0].token_ids
        else:
            assert llm.generate([[1, 2, 3]], asking)[0].outputs[0].logprobs
