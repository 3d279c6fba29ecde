"""Drafters that remember earlier answers draft an answer that is given again, whatever its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import Case, run_together
from trtspec import LLM, SamplingParams
from trtspec.engine.draft_length import DraftLength

NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
CASE = Case([3, 1, 4, 1, 5], SamplingParams(temperature=1.0, seed=5, max_tokens=48, ignore_eos=True))


@pytest.mark.parametrize(
    ("speculation", "remembers"),
    [
        ({"method": "suffix"}, True),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 0}, False),
        ({**NGRAM, "is_public_pool": True}, True),
        ({**NGRAM, "is_public_pool": False}, False),
        (NGRAM, False),
    ],
)
def test_an_answer_given_before_is_drafted(target: Path, speculation: dict[str, Any], remembers: bool) -> None:
    with LLM(target, {**speculation, "num_speculative_tokens": 3}) as llm:
        first, second = run_together(llm.engine, [CASE]), run_together(llm.engine, [CASE])
    assert first.outcomes == second.outcomes
    before, after = first.speculation.tokens_per_step, second.speculation.tokens_per_step
    assert after > before + 0.5 if remembers else after == before


@pytest.mark.parametrize("speculation", [{"method": "suffix"}, {**NGRAM, "is_public_pool": True}])
def test_an_answer_that_was_not_drafted_is_remembered_to_its_end(
    target: Path, speculation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts do not pay, nobody asks for any. The text becomes known when its request ends."""
    with LLM(target, {**speculation, "num_speculative_tokens": "auto"}, backend="eager", max_batch_size=1) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(DraftLength, "asks", lambda *_: False)
            first = run_together(llm.engine, [CASE])
        assert first.speculation.num_draft_tokens == 0
        monkeypatch.setattr(DraftLength, "asks", lambda *_: True)
        monkeypatch.setattr(DraftLength, "verify", lambda self, drafts, batch: [offer.length for offer in drafts])
        second = run_together(llm.engine, [CASE])
    assert first.outcomes == second.outcomes
    assert second.speculation.num_accepted_tokens >= 36
