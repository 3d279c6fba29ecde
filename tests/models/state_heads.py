"""Shared code for tests of heads that read the target's last hidden state.

It compares an engine's drafts with an oracle, and checks that bad checkpoints are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.checkpoints import edit_config, edit_tensors
from tests.e2e.head_cases import watch
from tests.e2e.tiny import Case, run_together
from trtspec import LLM, SamplingParams
from trtspec.errors import TrtSpecError

VOCAB = 199
"""Vocabulary size of the targets of tests.checkpoints."""
Bad = tuple[Callable[[Path], object], type[TrtSpecError], tuple[str, ...]]
"""A change of a checkpoint, the type of the error that it causes, and words in the message."""


def no_attend(*args: object) -> Tensor:
    raise AssertionError("these heads have no attention")


def change_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_tensors(folder, change)


def change_config(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: edit_config(folder, **fields)


def assert_refused(target: Path, wishes: dict[str, Any], bad: Bad) -> None:
    """Check that the error is typed and its message names the model, the field or tensor, and the expected value."""
    change, error, words = bad
    change(Path(wishes["model"]))
    with pytest.raises(error) as caught:
        LLM(target, wishes)
    message = str(caught.value)
    missing = [word for word in (*words, "draft", str(wishes["model"])) if word not in message]
    assert not missing, message


def assert_drafts(
    target: Path,
    wishes: dict[str, Any],
    k: int,
    chain: Callable[[Tensor, int], list[int]],
    theirs: transformers.PreTrainedModel,
) -> None:
    """Check that the greedy drafts after every token of two texts are those of `chain`.

    Arguments of `chain`: transformers' last hidden state [H] of the last kept token, and the token that the target drew
    there.
    """
    generator = torch.Generator().manual_seed(2)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    cases = [Case(torch.randint(3, VOCAB, (n,), generator=generator).tolist(), params) for n in (19, 6)]
    with LLM(target, {**wishes, "num_speculative_tokens": k}, max_batch_size=2, max_num_tokens=12) as llm:
        head = watch(llm)
        run = run_together(llm.engine, cases)  # the longer prompt in chunks
    chains: dict[tuple[int, int], list[int]] = {}
    for (request, start, place), made in sorted(head.made.items()):
        ((_, draft),) = made
        assert place == start + len(chains.setdefault((request, start), []))
        chains[request, start].append(draft)
    assert len(chains) > 20
    for request in run.requests:
        tokens = request.tokens
        with torch.no_grad():
            out = theirs(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        states = out.hidden_states[-1][0]  # [n, H], after the last norm
        for (owner, start), drafts in chains.items():
            if owner == request.request_id and start <= len(tokens):
                assert drafts == chain(states[start - 2], tokens[start - 1])
