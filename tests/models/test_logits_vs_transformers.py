"""trtspec's decoder over the paged cache, compared with transformers.

Logits agree within 1e-4 in fp32, and greedy continuations are identical. Prompts of 1 to 300 tokens are fed in chunks
of drawn sizes, with several ragged requests packed in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.checkpoints import ARCHS, make_checkpoint, oracle, oracle_decode, oracle_logits
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.core import AttnMetadata
from trtspec.kv.pool import allocate_layers
from trtspec.models.attention import PagedAttend
from trtspec.models.decoder import Decoder
from trtspec.models.weights import load_decoder

MAX_LEN = 300 + 64
TOLERANCE = 1e-4  # fp32; transformers itself differs by up to 3e-5 between one pass and token by token
PROMPT_LENS = (1, 2, 15, 16, 17, 18, 33, 64, 65, 128, 129, 255, 256, 257, 300)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in ARCHS},
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama_wide_heads": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "llama_yarn_mscale": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8,
                "mscale": 0.7,
                "mscale_all_dim": 0.3,
                "truncate": False,
            }
        },
    ),
    "qwen2_tied_partly_windowed": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
    ),
    "mimo": ("mimo", {"num_nextn_predict_layers": 2}),
    "mimo_partly_windowed": ("mimo", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}),
    "qwen3_tied_biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 32}),
}


class Paged:
    """A decoder with a paged cache, fed packed batches.

    Blocks are assigned in shuffled order; block 0 stays scratch.
    """

    def __init__(self, decoder: Decoder, num_requests: int, block_size: int = 16, max_len: int = MAX_LEN) -> None:
        self.decoder = decoder
        columns = -(-max_len // block_size)
        order = torch.randperm(num_requests * columns, generator=torch.Generator().manual_seed(0)) + 1
        self.tables = order.view(num_requests, columns).to(torch.int32)
        dtype = decoder.embedding.weight.dtype
        self.kv = allocate_layers(decoder.spec.kv_layers, len(order) + 1, block_size, dtype)
        for k_cache, v_cache in self.kv:  # attention must never read stale rows
            k_cache.fill_(float("nan"))
            v_cache.fill_(float("nan"))
        self.lens = [0] * num_requests

    @torch.no_grad()
    def step(self, rows: dict[int, Sequence[int]]) -> dict[int, Tensor]:
        """Append rows[b] to request b, all packed in one batch -> their logits [n, V] per request."""
        counts = [len(tokens) for tokens in rows.values()]
        for request, tokens in rows.items():
            self.lens[request] += len(tokens)
        attn = AttnMetadata(
            cu_q_lens=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            kv_lens=torch.tensor([self.lens[request] for request in rows], dtype=torch.int32),
            block_tables=self.tables[list(rows)],
            tree_mask=torch.empty(0, dtype=torch.int32),
        )
        input_ids = torch.tensor([token for tokens in rows.values() for token in tokens])
        attend = PagedAttend(attn, self.kv, self.decoder.spec.windows)
        hidden = self.decoder(input_ids, attn.positions(len(input_ids)), attend)
        return dict(zip(rows, self.decoder.logits(hidden).split(counts), strict=True))


@dataclass
class Case:
    """An architecture: trtspec's decoder, and prompts with the oracle's logits [T, V]."""

    decoder: Decoder
    oracle: Any
    dynamic_rope: bool  # transformers then stretches a whole pass by its length; expected: token by token
    prompts: list[list[int]] = field(default_factory=list)
    expected: list[Tensor] = field(default_factory=list)

    def logits(self, tokens: list[int]) -> Tensor:
        return oracle_decode(self.oracle, tokens) if self.dynamic_rope else oracle_logits(self.oracle, tokens)

    def assert_close(self, ours: Tensor, theirs: Tensor) -> None:
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
        # transformers computes a new base per length with scalar pow, trtspec a table with vector pow. An ulp of
        # frequency is 1e-5 rad at position 200.
        tolerance = 4 * TOLERANCE if self.dynamic_rope else TOLERANCE
        assert (ours - theirs).abs().max().item() <= tolerance


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    arch, overrides = CASES[request.param]
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("checkpoints"), arch, **overrides)
    decoder = load_decoder(ModelConfig.from_folder(folder), torch.float32, max_position=MAX_LEN)
    made = Case(decoder, oracle(folder), arch == "llama_dynamic")
    generator = torch.Generator().manual_seed(0)
    for length in PROMPT_LENS:
        made.prompts.append(torch.randint(3, 199, (length,), generator=generator).tolist())
        made.expected.append(made.logits(made.prompts[-1]))
    return made


@settings(max_examples=6, deadline=None)
@given(
    chosen=st.lists(st.integers(0, len(PROMPT_LENS) - 1), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 300) | st.integers(1, 8), min_size=1, max_size=7),
    waits=st.lists(st.integers(0, 1), max_size=7),
    block_size=st.sampled_from([1, 4, 16, 64]),
)
def test_logits(case: Case, chosen: list[int], sizes: list[int], waits: list[int], block_size: int) -> None:
    """Logits of packed prompts equal the oracle's.

    Each prompt is prefilled in chunks of the drawn sizes, used in turn. Some requests wait while others continue.
    """
    paged = Paged(case.decoder, len(chosen), block_size)
    got: list[list[Tensor]] = [[] for _ in chosen]
    chunk_size, waiting = cycle([*sizes, 40]), cycle([*waits, 0])
    while unfinished := [b for b, i in enumerate(chosen) if paged.lens[b] < PROMPT_LENS[i]]:
        rows: dict[int, Sequence[int]] = {}
        for b in unfinished:
            if not next(waiting):
                start = paged.lens[b]
                rows[b] = case.prompts[chosen[b]][start : start + next(chunk_size)]
        for b, logits in (paged.step(rows) if rows else {}).items():
            got[b].append(logits)
    for b, i in enumerate(chosen):
        case.assert_close(torch.cat(got[b]), case.expected[i])


def test_every_prompt_length_in_one_batch(case: Case) -> None:
    paged = Paged(case.decoder, len(PROMPT_LENS))
    for b, logits in paged.step(dict(enumerate(case.prompts))).items():
        case.assert_close(logits, case.expected[b])


def test_greedy_continuation(case: Case) -> None:
    """64 greedy tokens equal the oracle's, with all prompts generating in one packed batch."""
    starts = [PROMPT_LENS.index(length) for length in (1, 17, 64, 300)]
    paged = Paged(case.decoder, len(starts))
    logits = paged.step({b: case.prompts[i] for b, i in enumerate(starts)})
    ours: list[list[int]] = [[] for _ in starts]
    for _ in range(64):
        for b in range(len(starts)):
            ours[b].append(int(logits[b][-1].argmax()))
        logits = paged.step({b: [ours[b][-1]] for b in range(len(starts))})
    for b, i in enumerate(starts):
        # One pass over the prompt and trtspec's output predicts every token of that output. It equals decoding step by
        # step and is cheaper.
        theirs = case.logits(case.prompts[i] + ours[b])[PROMPT_LENS[i] - 1 : -1]
        assert ours[b] == theirs.argmax(-1).tolist()
    assert len({token for tokens in ours for token in tokens}) >= 25, "degenerate output proves little"


def test_rows_are_bitwise_independent_of_chunks_and_neighbours(case: Case) -> None:
    whole = {}
    for b, prompt in enumerate(case.prompts):
        whole[b] = Paged(case.decoder, 1).step({0: prompt})[0]
    packed, sizes = Paged(case.decoder, len(PROMPT_LENS), block_size=8), (1, 7, 64, 2, 5, 128)
    turn = 0
    while rows := {
        b: prompt[packed.lens[b] : packed.lens[b] + sizes[(turn + b) % len(sizes)]]
        for b, prompt in enumerate(case.prompts)
        if packed.lens[b] < len(prompt)
    }:
        before = dict(enumerate(packed.lens))
        for b, logits in packed.step(rows).items():
            assert torch.equal(logits, whole[b][before[b] : before[b] + len(logits)])
        turn += 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_half_precision_stays_near_fp32(tmp_path: Path, arch: str, dtype: str) -> None:
    """A half-precision checkpoint is loaded in its dtype; its logits are close to those of its weights in fp32."""
    config = ModelConfig.from_folder(make_checkpoint(tmp_path, arch, dtype))
    assert config.dtype == dtype
    tokens = torch.randint(3, 199, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    half, full = (
        Paged(load_decoder(config, kind, max_position=MAX_LEN), 1).step({0: tokens})[0]
        for kind in (getattr(torch, dtype), torch.float32)
    )
    assert half.dtype == torch.float32
    error = (half - full).norm() / full.norm()
    assert error < (0.15 if dtype == "bfloat16" else 0.02)
