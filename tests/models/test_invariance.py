"""Logits of the whole model depend on a row's own tokens and positions, not on packing, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.checkpoints import make_checkpoint
from tests.models.test_logits_vs_transformers import Paged
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.models.decoder import Decoder
from trtspec.models.weights import load_decoder

LENGTH = 270  # crosses the attention tile of 256 tokens
VOCAB = 199


@dataclass(frozen=True)
class Case:
    """A decoder, some sequences, and the logits of each sequence from one pass without other sequences."""

    decoder: Decoder
    sequences: list[list[int]]
    logits: list[Tensor]

    def paged(self, requests: int, block_size: int = 16) -> Paged:
        return Paged(self.decoder, requests, block_size, max_len=LENGTH + 20)


# The models have windows, q/k norms and biases, and tied heads. Their hidden sizes do not fill a cache line of either
# type.
MODELS = {
    "llama": ("llama", {}),
    "mistral_swa": ("mistral_swa", {}),
    "qwen2_odd": (
        "qwen2",
        {
            "hidden_size": 42,
            "intermediate_size": 75,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 14,
        },
    ),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
}


@pytest.fixture(
    scope="module",
    params=[(name, dtype) for name in MODELS for dtype in ("float32", "bfloat16", "float16")],
    ids=lambda param: "-".join(param),
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, dtype = request.param
    arch, overrides = MODELS[name]
    folder = make_checkpoint(tmp_path_factory.mktemp("invariance"), arch, dtype, **overrides)
    decoder = load_decoder(ModelConfig.from_folder(folder), getattr(torch, dtype), max_position=LENGTH + 20)
    g = torch.Generator().manual_seed(0)
    sequences = torch.randint(3, VOCAB, (4, LENGTH), generator=g).tolist()
    made = Case(decoder, sequences, [])
    for tokens in sequences:
        made.logits.append(made.paged(1).step({0: tokens})[0])
    assert all(logits.isfinite().all() for logits in made.logits)
    return made


places = st.integers(1, LENGTH - 1) | st.sampled_from([1, 2, 3, 15, 16, 17, 255, 256, 257])
row_counts = st.integers(1, 5) | st.integers(1, 120)


@settings(max_examples=5, deadline=None)
@given(cuts=st.sets(places, max_size=8), block_size=st.sampled_from([1, 7, 16, 64]))
def test_every_chunking_of_a_sequence(case: Case, cuts: set[int], block_size: int) -> None:
    paged, edges = case.paged(1, block_size), [0, *sorted(cuts), LENGTH]
    logits = [paged.step({0: case.sequences[0][a:b]})[0] for a, b in pairwise(edges)]
    assert torch.equal(torch.cat(logits), case.logits[0])


@settings(max_examples=5, deadline=None)
@given(steps=st.lists(st.dictionaries(st.integers(0, 3), row_counts, min_size=1), min_size=3, max_size=8))
def test_every_company(case: Case, steps: list[dict[int, int]]) -> None:
    """Logits do not depend on the other sequences of a batch.

    Four sequences advance at different paces and stand in any order; some skip a step.
    """
    paged = case.paged(4)
    for step in steps:
        starts = list(paged.lens)
        rows = {b: case.sequences[b][starts[b] : starts[b] + size] for b, size in step.items() if starts[b] < LENGTH}
        for b, logits in (paged.step(rows) if rows else {}).items():
            assert torch.equal(logits, case.logits[b][starts[b] : starts[b] + len(logits)])


@pytest.mark.parametrize("K", [1, 2, 3, 4, 8])
def test_every_number_of_drafts(case: Case, K: int) -> None:
    """Logits of kept rows do not depend on the K rows after each token, of which none, some or all are right.

    Wrong rows are rewound and overwritten.
    """
    paged, start = case.paged(2), 250
    paged.step({b: case.sequences[b][:start] for b in (0, 1)})
    for accepted in (0, K // 2, 0, min(K, 5)):
        rows = {}
        for b in (0, 1):
            right = case.sequences[b][start : start + 1 + K]
            rows[b] = [*right[: 1 + accepted], *((token + 1) % VOCAB for token in right[1 + accepted :])]
        for b, logits in paged.step(rows).items():
            assert torch.equal(logits[: accepted + 1], case.logits[b][start : start + accepted + 1])
        start += accepted + 1
        paged.lens = [start, start]


def test_a_large_batch(case: Case) -> None:
    """Logits are the same in a batch of 60 requests at 60 different places of three sequences, 1 to 4 rows each."""
    paged = Paged(case.decoder, 60, max_len=70)
    paged.step({b: case.sequences[b % 3][: b + 1] for b in range(60)})
    rows = {b: case.sequences[b % 3][b + 1 : b + 2 + b % 4] for b in range(60)}
    for b, logits in paged.step(rows).items():
        assert torch.equal(logits, case.logits[b % 3][b + 1 : b + 1 + len(logits)])


@pytest.mark.usefixtures("two_threads")
def test_number_of_threads(case: Case) -> None:
    """Logits do not depend on the number of threads; the expected ones were computed on one thread.

    This holds for stock kernels of these sizes. It is not promised for all.
    """
    paged = case.paged(1)
    logits = [paged.step({0: case.sequences[0][a:b]})[0] for a, b in ((0, 200), (200, 201), (201, LENGTH))]
    assert torch.equal(torch.cat(logits), case.logits[0])
