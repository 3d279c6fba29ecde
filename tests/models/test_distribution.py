"""Speculation keeps the distribution, and for a given seed every token, against transformers' model and processors.

Statistical tests use fixed seeds, so they are deterministic. FALSE_ALARM is the rate at which a correct engine would
fail them if the seeds were random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.checkpoints import make_checkpoint, oracle
from tests.e2e.tiny import perturbed
from trtspec import LLM, SamplingParams
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.core import AttnMetadata, Proposal
from trtspec.kv.pool import allocate_layers
from trtspec.models.attention import PagedAttend
from trtspec.models.weights import load_decoder
from trtspec.ops import spec_sample
from trtspec.outputs import SpeculationStats
from trtspec.protocols import DraftRequest

FALSE_ALARM = 1e-4
VOCAB, K = 5, 2
PROMPT = [1, 2, 3, 1]
NUM_TOKENS = K + 2  # the first is drawn after prefill, tokens 2..K+2 under speculation
NUM_DRAWS = 20 * 512


def make_tiny(folder: Path, name: str, **overrides: Any) -> Path:
    """Make a checkpoint of one layer and one head, with weights large enough for varied output."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "initializer_range": 0.5,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return make_checkpoint(folder, "llama", name=name, **{**fields, **overrides})


# --- the joint distribution of the tokens of one step -----------------------------------------------------------------


def exact_joint(folder: Path) -> NDArray[np.float64]:
    """Probability of every continuation of PROMPT by NUM_TOKENS tokens, [VOCAB] * NUM_TOKENS."""
    model, processed = oracle(folder), LogitsProcessorList(PROCESSORS)
    contexts, joint = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            scores = processed(contexts, model(contexts, use_cache=False).logits[:, -1].float())
        joint = (joint[:, None] * scores.double().softmax(1)).flatten()
        contexts = torch.cat(
            (contexts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(contexts))[:, None]), 1
        )
    return joint.view([VOCAB] * NUM_TOKENS).numpy()


def chi_square(counts: NDArray[np.int64], joint: NDArray[np.float64]) -> float:
    """p-value of counts drawn from `joint`; cells with an expected count below 5 are merged."""
    observed, expected = counts.ravel().astype(np.float64), joint.ravel() * counts.sum()
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return float(scipy.stats.chisquare(observed, expected * (observed.sum() / expected.sum())).pvalue)


# The same filters as trtspec's fields and as transformers' processors. Each of the four changes this model's joint
# distribution. No probability is within 1e-3 of a threshold, because the last bits of the logits could otherwise cross
# it.
FILTERS: dict[str, Any] = {"temperature": 2.0, "top_k": 4, "top_p": 0.9, "min_p": 0.2}
PROCESSORS = (TemperatureLogitsWarper(2.0), TopKLogitsWarper(4), TopPLogitsWarper(0.9), MinPLogitsWarper(0.2))
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@dataclass(frozen=True)
class Drawn:
    """NUM_DRAWS continuations of PROMPT, each with its own seed, drawn under speculation."""

    target: Path
    draft: Path
    counts: NDArray[np.int64]  # [VOCAB] * NUM_TOKENS
    speculation: SpeculationStats

    @cached_property
    def joint(self) -> NDArray[np.float64]:
        return exact_joint(self.target)


@pytest.fixture(scope="module", params=["draft_model", pytest.param("ngram", marks=pytest.mark.long)])
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    target = make_tiny(tmp_path_factory.mktemp("distribution"), "target")
    draft = perturbed(target, noise=0.5)
    own_model = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}
    speculation = NGRAM if request.param == "ngram" else own_model
    llm = LLM(target, speculation, max_batch_size=512, max_num_tokens=4096, max_seq_len=16)
    counts = np.zeros([VOCAB] * NUM_TOKENS, dtype=np.int64)
    offset = 10**6 if request.param == "ngram" else 0  # the same seeds would produce the same tokens in both modes
    for first in range(offset, offset + NUM_DRAWS, 512):
        params = [
            SamplingParams(**FILTERS, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
            for seed in range(first, first + 512)
        ]
        outputs = llm.generate([PROMPT] * 512, params, use_tqdm=False)
        np.add.at(counts, tuple(np.array([output.outputs[0].token_ids for output in outputs]).T), 1)
    return Drawn(target, draft, counts, llm.get_metrics().speculation)


def test_joint_of_the_tokens_drawn_under_speculation(drawn: Drawn) -> None:
    """Tokens 2..K+2 have the exact joint distribution, summed over the first token."""
    assert chi_square(drawn.counts.sum(0), drawn.joint.sum(0)) > FALSE_ALARM


def test_joint_with_the_token_before_them(drawn: Drawn) -> None:
    assert chi_square(drawn.counts, drawn.joint) > FALSE_ALARM


def test_nothing_is_drawn_that_the_filters_remove(drawn: Drawn) -> None:
    assert drawn.counts[drawn.joint == 0].sum() == 0


def test_some_drafts_were_accepted_and_some_rejected_at_every_position(drawn: Drawn) -> None:
    rates = drawn.speculation.acceptance_per_position
    assert len(rates) == K
    assert all(0.01 < rate < 0.99 for rate in rates)


def test_the_draws_would_tell_the_draft_from_the_target(drawn: Drawn) -> None:
    """The tests above have power: they reject the draft's joint distribution."""
    assert chi_square(drawn.counts.sum(0), exact_joint(drawn.draft).sum(0)) < 1e-20


# --- the same seed ----------------------------------------------------------------------------------------------------

ENGINES: dict[str, tuple[dict[str, Any] | None, dict[str, int]]] = {
    "plain_together": (None, {"max_batch_size": 64}),
    "plain_in_chunks": (None, {"max_batch_size": 5, "max_num_tokens": 7}),
    "ngram_K1": ({**NGRAM, "num_speculative_tokens": 1}, {"max_batch_size": 16}),
    "ngram_K4": ({**NGRAM, "num_speculative_tokens": 4}, {"max_batch_size": 7}),
    "draft_K1": ({"method": "draft_model", "num_speculative_tokens": 1}, {"max_batch_size": 64}),
    "draft_K3_alone": ({"method": "draft_model", "num_speculative_tokens": 3}, {"max_batch_size": 1}),
    "draft_K3_in_chunks": (
        {"method": "draft_model", "num_speculative_tokens": 3},
        {"max_batch_size": 6, "max_num_tokens": 24, "num_kv_blocks": 30, "block_size": 4},
    ),
    "draft_K7": ({"method": "draft_model", "num_speculative_tokens": 7}, {"max_batch_size": 16}),
    "arg_max_draft_K3": (
        {"method": "draft_model", "num_speculative_tokens": 3, "draft_sample_method": "greedy"},
        {"max_batch_size": 16},
    ),
}


@dataclass(frozen=True)
class Seeded:
    """Requests with seeds, and the tokens that a plain engine draws for them one at a time."""

    target: Path
    draft: Path
    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[list[int]]


def token_ids(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Seeded:
    target = make_tiny(tmp_path_factory.mktemp("seeded"), "target", vocab_size=12, num_hidden_layers=2)
    rng = random.Random(0)
    prompts = [[rng.randrange(12) for _ in range(rng.randint(1, 20))] for _ in range(16)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.5, 1.0, 1.3]),
            top_k=rng.choice([0, 0, 3, 8]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.0, 0.1]),
            seed=rng.randrange(2**64),
            max_tokens=rng.randint(5, 20),
            ignore_eos=True,
        )
        for _ in prompts
    ]
    expected = token_ids(LLM(target, max_batch_size=1), prompts, params)
    return Seeded(target, perturbed(target, noise=0.3), prompts, params, expected)


@pytest.mark.parametrize("name", ENGINES)
def test_same_seed_same_tokens_whatever_the_batch_K_or_mode(seeded: Seeded, name: str) -> None:
    speculation, limits = ENGINES[name]
    if speculation is not None and speculation["method"] == "draft_model":
        speculation = {**speculation, "model": str(seeded.draft)}
    llm = LLM(seeded.target, speculation, **limits)
    assert token_ids(llm, seeded.prompts, seeded.params) == seeded.expected


def test_another_seed_draws_other_tokens(seeded: Seeded) -> None:
    """Seeds change the tokens, so the test above does not compare tokens that no seed could change."""
    prompt, llm = seeded.prompts[0], LLM(seeded.target)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(20)]
    assert len({tuple(ids) for ids in token_ids(llm, [prompt] * 20, params)}) == 20


# --- a draft that is the target ---------------------------------------------------------------------------------------


class PermutedSelf:
    """A user's drafter: the target itself, except that column i of its head is the target's id `vocab_ids[i]`."""

    def __init__(self, target: Path, vocab_ids: Tensor) -> None:
        config = ModelConfig.from_folder(target)
        self.decoder = load_decoder(config, torch.float32)
        self.decoder.head.weight.data = self.decoder.head.weight.data[vocab_ids]
        self.vocab_ids = vocab_ids

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Draft each token in a pass over the whole sequence, which is slow but needs no cache of its own."""
        lengths = [request.max_draft_len for request in requests]
        tokens = [list(request.tokens) for request in requests]
        seeds = torch.tensor([request.sampling.seed for request in requests])
        drafts = []
        for _ in range(max(lengths)):
            positions = torch.tensor([len(row) for row in tokens])
            greedy = torch.zeros(len(tokens), dtype=torch.bool)
            drawn = spec_sample(self._last_logits(tokens), greedy, seeds, positions, self.vocab_ids)
            tokens = [[*row, token] for row, token in zip(tokens, drawn.tolist(), strict=True)]
            drafts.append(drawn)
        return Proposal(torch.stack(drafts, 1), torch.tensor(lengths, dtype=torch.int32))

    def forget(self, request_id: int) -> None:
        """Do nothing, because this drafter keeps no state."""

    @torch.no_grad()
    def _last_logits(self, tokens: list[list[int]]) -> Tensor:
        lengths = [len(row) for row in tokens]
        block_size = max(lengths)  # one block for each sequence
        attn = AttnMetadata.of(lengths, lengths, [[b + 1] for b in range(len(tokens))])
        kv = allocate_layers(self.decoder.spec.kv_layers, len(tokens) + 1, block_size, torch.float32)
        ids = torch.tensor(list(itertools.chain.from_iterable(tokens)))
        attend = PagedAttend(attn, kv, self.decoder.spec.windows)
        hidden = self.decoder(ids, attn.positions(len(ids)), attend)
        return self.decoder.logits(hidden[attn.cu_q_lens[1:].long() - 1])


def self_drafted(target: Path, speculation: dict[str, Any], K: int, **fields: Any) -> SpeculationStats:
    """Statistics of 24 sampled requests of 1 + 3 (K + 1) tokens, so that no step is cut short."""
    llm = LLM(target, {**speculation, "num_speculative_tokens": K}, max_batch_size=8)
    rng = random.Random(K)
    prompts = [[rng.randrange(12) for _ in range(rng.randint(1, 12))] for _ in range(24)]
    params = [
        SamplingParams(
            temperature=1.0, seed=rng.randrange(2**64), max_tokens=1 + 3 * (K + 1), ignore_eos=True, **fields
        )
        for _ in prompts
    ]
    llm.generate(prompts, params, use_tqdm=False)
    return llm.get_metrics().speculation


@pytest.mark.parametrize("K", [1, 2, 5])
@pytest.mark.parametrize("fields", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.02}], ids=["plain", "filters"])
def test_self_draft_gives_all_tokens_every_step(seeded: Seeded, K: int, fields: dict[str, Any]) -> None:
    stats = self_drafted(seeded.target, {"method": "draft_model", "model": str(seeded.target)}, K, **fields)
    assert (stats.steps, stats.tokens) == (24 * 3, 24 * 3 * (K + 1))


@pytest.mark.parametrize("K", [1, 3])
def test_self_draft_with_a_permuted_vocabulary_gives_all_tokens_every_step(seeded: Seeded, K: int) -> None:
    """Noise belongs to the target's id, not to the draft's column."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    drafter = PermutedSelf(seeded.target, order)
    stats = self_drafted(seeded.target, {"method": "custom_class", "drafter": drafter}, K)
    assert (stats.steps, stats.tokens) == (24 * 3, 24 * 3 * (K + 1))
