"""Penalties and biases of whole generations: those of transformers and of vLLM's formula.

Speculation does not change them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import make_checkpoint
from tests.contract.modes import Models, check
from tests.e2e.tiny import with_constraints
from trtspec import LLM, SamplingParams
from trtspec.errors import RequestError
from trtspec.modes import SpeculativeDecodingMode as M

PROMPTS = [[5, 9, 5, 9, 5, 9, 5], [11, 12, 13], [100, 101, 100, 7, 8, 100]]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models"), "llama", eos_token_id=None)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()


def generated(checkpoint: Path, speculation: dict[str, Any] | None, **asked: Any) -> list[list[int]]:
    with LLM(checkpoint, speculation, max_batch_size=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, **asked)
        return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "ngram"])
@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_is_that_of_transformers(
    checkpoint: Path, oracle: Any, penalty: float, speculation: dict[str, Any] | None
) -> None:
    want = []
    for prompt in PROMPTS:
        ids = oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, repetition_penalty=penalty)
        want.append(ids[0, len(prompt) :].tolist())
    assert generated(checkpoint, speculation, repetition_penalty=penalty) == want
    assert generated(checkpoint, speculation) != want


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "ngram"])
def test_biases_are_scaled_with_what_they_are_added_to(
    checkpoint: Path, oracle: Any, speculation: dict[str, Any] | None
) -> None:
    """Biases are added before penalties, as in transformers: 4 on a seen 2 makes 6 / 1.3, not 2 / 1.3 + 4."""
    want = []
    for prompt in PROMPTS:
        ids = oracle.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=24,
            repetition_penalty=1.3,
            sequence_bias=[[[token], value] for token, value in {5: 4.0, 9: 4.0}.items()],
        )
        want.append(ids[0, len(prompt) :].tolist())
    assert generated(checkpoint, speculation, repetition_penalty=1.3, logit_bias={5: 4.0, 9: 4.0}) == want


def formula(logits: np.ndarray, prompt: list[int], output: list[int], asked: dict[str, Any]) -> np.ndarray:
    """vLLM's formula for logits [V].

    Biases are added. Tokens in the prompt or the output are scaled. Tokens in the output are lowered.
    """
    for token, value in asked.get("logit_bias", {}).items():
        logits[token] += value
    counts = np.bincount(output, minlength=len(logits))
    seen = np.bincount(prompt + output, minlength=len(logits)) > 0
    scale = asked.get("repetition_penalty", 1.0)
    logits = np.where(seen, np.where(logits > 0, logits / scale, logits * scale), logits)
    return logits - asked.get("frequency_penalty", 0.0) * counts - asked.get("presence_penalty", 0.0) * (counts > 0)


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "ngram"])
@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.5},
        {"logit_bias": {3: 100.0}},
        {"logit_bias": dict.fromkeys(range(0, 199, 2), -100.0)},
        {"repetition_penalty": 1.2, "presence_penalty": -0.6, "frequency_penalty": 0.4, "logit_bias": {9: 4.0, 5: -4}},
    ],
    ids=["presence", "frequency", "negative", "one token", "odd tokens", "all"],
)
def test_penalties_and_biases_are_vllms(
    checkpoint: Path, oracle: Any, asked: dict[str, Any], speculation: dict[str, Any] | None
) -> None:
    for prompt, got in zip(PROMPTS, generated(checkpoint, speculation, **asked), strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + got])).logits[0].double().numpy()
        for i, token in enumerate(got):
            changed = formula(logits[len(prompt) - 1 + i].copy(), prompt, got[:i], asked)
            assert changed[token] >= changed.max() - 1e-4  # the same up to rounding


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = Models(tmp_path_factory.mktemp("modes"))
    made.cases = with_constraints(made.cases[30:60])
    return made


@pytest.mark.parametrize("mode", [M.NGRAM, M.DRAFT_TARGET, M.EAGLE3_ONE_MODEL, M.EAGLE3, M.MTP_EAGLE_ONE_MODEL])
def test_speculation_changes_nothing(models: Models, mode: M) -> None:
    assert check(models, mode, 3, "eager").verdict == "holds"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logit_bias": {199: 1.0}}, "logit_bias holds token 199; the vocabulary has 199 ids"),
    ],
)
def test_what_a_model_cannot_do_is_refused(checkpoint: Path, asked: dict[str, Any], message: str) -> None:
    with LLM(checkpoint) as llm, pytest.raises(RequestError, match=message):
        llm.generate(PROMPTS, SamplingParams(**asked), use_tqdm=False)
