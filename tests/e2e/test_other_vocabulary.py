"""A draft model with a vocabulary of its own: its ids are translated both ways, and change no output.

Drafts are the target's weights, with rows in the order of another vocabulary. So they are right exactly as far as the
translation is right.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from tests.checkpoints import edit_config, edit_tensors
from tests.e2e.tiny import PIECES, VOCAB, assert_all_blocks_free, draw_cases, perturbed, run_alone, run_together
from trtspec import LLM, SamplingParams
from trtspec.build.build import build_engine
from trtspec.config.engine import EngineConfig
from trtspec.errors import ConfigError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.draft_model.drafter import ChainDrafter

K = 3
CASES = draw_cases(24, seed=11)
TIGHT: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 32, "num_kv_blocks": 41, "block_size": 4}
ORDER = [5, 0, 11, 3, 14, 7, 1, 9, 2, 15, 12, 4, 10, 6, 13, 8]  # the target's id of each draft id, in another order
FOREIGN = ("<unk>", "zz", "\u2581y", "q")  # pieces that the target does not have


def respell(model: Path, pieces: Sequence[str], padding: int = 0) -> None:
    """Give a copy of the target (or of it with noise) the vocabulary `pieces`, and `padding` more ids.

    Blanks are written as sentencepiece writes them. Rows of pieces that the target does not have are noise.
    """
    rows = [PIECES.index(piece) if piece in PIECES else -1 for piece in pieces] + [-1] * padding
    generator = torch.Generator().manual_seed(3)

    def choose(weight: torch.Tensor) -> torch.Tensor:
        noise = weight.std() * torch.randn(len(rows), weight.shape[1], generator=generator)
        return torch.where(torch.tensor(rows)[:, None] >= 0, weight[rows], noise)

    names = ("model.embed_tokens.weight", "lm_head.weight")
    edit_tensors(model, lambda tensors: tensors.update({name: choose(tensors[name]) for name in names}))
    edit_config(model, vocab_size=len(rows))
    spelled = {piece.replace(" ", "\u2581", 1): token for token, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordLevel(spelled, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", "eos_token": "</s>"}))


def with_draft(model: Path, **fields: Any) -> dict[str, Any]:
    speculation = {"method": "draft_model", "model": str(model), "num_speculative_tokens": K}
    return {**speculation, "use_heterogeneous_vocab": True, **fields}


@pytest.fixture(scope="module")
def permuted(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target itself, with its ids in another order."""
    model = tmp_path_factory.mktemp("permuted") / "draft"
    shutil.copytree(target, model)
    respell(model, [PIECES[token] for token in ORDER])
    return model


@pytest.fixture(scope="module")
def other(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise and another vocabulary.

    It lacks two of the target's tokens, and has four tokens that the target does not have, and five ids without tokens.
    """
    model = perturbed(target, noise=0.05, folder=tmp_path_factory.mktemp("other"))
    kept = [PIECES[token] for token in ORDER if token not in (3, 12)]
    respell(model, [*FOREIGN[:2], *kept, *FOREIGN[2:]], padding=5)
    return model


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        ("float32", None),
        ("bfloat16", "greedy"),
        pytest.param("float32", "greedy", marks=pytest.mark.long),
        pytest.param("bfloat16", None, marks=pytest.mark.long),
    ],
)
def test_outcomes_are_those_of_plain_decoding(target: Path, other: Path, dtype: str, how: str | None) -> None:
    """Outcomes are those of plain decoding, in a cache too small for all, with prompts in chunks.

    Drafts are right and wrong at every position.
    """
    with LLM(target, dtype=dtype, num_kv_blocks=512) as llm:
        expected = run_alone(llm.engine, CASES)
    with LLM(target, with_draft(other, draft_sample_method=how), dtype=dtype, **TIGHT) as llm:
        run = run_together(llm.engine, CASES)
        assert run.outcomes == expected
        acceptance = run.speculation.acceptance_per_position
        assert len(acceptance) == K
        assert all(0 < share < 1 for share in acceptance), acceptance
        assert acceptance[0] > 0.25  # of 16 ids: a wrong translation would be right one time of 16
        assert llm.engine.loop.scheduler.num_preemptions > 0
        assert run.num_mixed_steps > 0
        assert_all_blocks_free(llm)


def test_a_draft_that_is_the_target_gives_k_plus_one_tokens_each_step(target: Path, permuted: Path) -> None:
    """A draft that is the target emits K + 1 tokens each step, at temperature 1.

    It samples with the noise of the target ids that its own ids stand for.
    """
    params = SamplingParams(temperature=1.0, max_tokens=1 + 5 * (K + 1), ignore_eos=True)
    cases = [dataclasses.replace(case, params=dataclasses.replace(params, seed=i)) for i, case in enumerate(CASES[:12])]
    with LLM(target, with_draft(permuted), max_batch_size=4, max_num_tokens=32) as llm:
        run = run_together(llm.engine, cases)
    verified = [e for step in run.steps for e in step if e.draft_len == K]
    assert len(verified) == 5 * len(cases)
    assert all(len(e.tokens) == K + 1 for e in verified)


def test_only_common_tokens_are_drafted(target: Path, other: Path) -> None:
    """Only common tokens are drafted.

    The target does not have some of the draft's tokens, and the draft does not have some of the target's.
    """
    drafted: set[int] = set()
    with LLM(target, with_draft(other), **TIGHT) as llm:
        drafter = llm.engine.loop.proposer.drafter
        assert isinstance(drafter, ChainDrafter)
        run_together(
            llm.engine,
            CASES,
            after_step=lambda _: drafted.update(t for r in llm.engine.loop.scheduler.running for t in r.drafts),
        )
    assert drafted == set(range(VOCAB)) - {3, 12}


def test_banned_tokens_are_the_targets(target: Path, permuted: Path) -> None:
    """min_tokens bans the target's ids that end a text. With a draft that is the target, no draft is lost to this."""
    params = SamplingParams(temperature=1.0, max_tokens=13, min_tokens=13, stop_token_ids=[1, 2, 4, 9])
    cases = [dataclasses.replace(case, params=dataclasses.replace(params, seed=i)) for i, case in enumerate(CASES[:12])]
    with LLM(target, with_draft(permuted), max_batch_size=4, max_num_tokens=32) as llm:
        run = run_together(llm.engine, cases)
    assert not {0, 1, 2, 4, 9} & {token for outcome in run.outcomes for token in outcome.token_ids[:-1]}
    assert run.speculation.acceptance_per_position == [1.0] * K


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aoti", "onnx"])
def test_a_built_engine_holds_the_translation(target: Path, other: Path, tmp_path: Path, backend: str) -> None:
    """A built engine holds the translation and needs no tokenizer of the draft. Its ids and drafts are eager's."""
    limits = {name: TIGHT[name] for name in ("max_batch_size", "max_num_tokens", "block_size")}
    speculation = read_speculative_config(with_draft(other))
    folder = tmp_path / "engine"
    build_engine(target, folder, speculation, EngineConfig(backend=backend, **limits))
    runs = []
    for model, asked in ((folder, None), (target, speculation)):
        with LLM(model, asked, **(TIGHT if asked else {"num_kv_blocks": TIGHT["num_kv_blocks"]})) as llm:
            runs.append(run_together(llm.engine, CASES))
    assert runs[0].outcomes == runs[1].outcomes
    assert runs[0].speculation == runs[1].speculation


def test_few_common_tokens_are_worth_a_warning(target: Path, permuted: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(target, with_draft(permuted), **TIGHT):
        pass
    assert "only 16 of the target's 16 tokens are among the 16 of the draft" in caplog.text


def test_no_common_token_is_an_error(target: Path, tmp_path: Path) -> None:
    model = tmp_path / "draft"
    shutil.copytree(target, model)
    respell(model, ["<unk>", *(f"{i}{i}" for i in range(9))])
    with pytest.raises(ConfigError, match=r"0 of the target's 16 tokens are among the 10 of .*; use a draft with more"):
        LLM(target, with_draft(model))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_both_tokenizers_are_needed(target: Path, permuted: Path, tmp_path: Path, role: str) -> None:
    folders = {"target": target, "draft": permuted}
    folders[role] = shutil.copytree(folders[role], tmp_path / role)
    (folders[role] / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=rf"there is no tokenizer\.json in the {role} model .*; put the model's own"):
        LLM(folders["target"], with_draft(folders["draft"]))
