"""The Triton kernels, compiled and launched through torch's ops on a GPU, against the references on the CPU.

Every new combination of dtype, head size, layout and form is a compilation of about a second. So shapes that kernels
are compiled for come from short lists. hypothesis draws the other shapes: always the same ones, and without shrinking.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.contract import batches
from tests.gpu import kernels
from tests.gpu.gpu import CUDA
from tests.gpu.kernels import ATTENTION_MODELS, GROUPS, LAYOUTS, OPS, Layer, random_rows
from tests.unit.attention_cases import LONGEST, Batch, Model, Part, TreePart, tree_batch, tree_parts

pytestmark = pytest.mark.gpu

few = settings(deadline=None, max_examples=8, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
many = settings(few, max_examples=50)
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.memcheck
@pytest.mark.parametrize("op", OPS)
def test_the_kernel_that_serves_is_ours(op: str) -> None:
    """References are registered for every device at once, which is no registration for CUDA."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"trtspec::{op}", "CUDA")


# -- attention ---------------------------------------------------------------------------------------------------------

chains = st.builds(Part, st.integers(0, 2), st.integers(0, 270), st.integers(1, 40))
all_models = pytest.mark.parametrize("model", ATTENTION_MODELS, ids=range(len(ATTENTION_MODELS)))


@all_models
@few
@given(parts=kernels.ragged(), seed=st.integers(0, 2**31))
def test_attention_is_the_reference_s(model: Model, parts: list[Part], seed: int) -> None:
    kernels.check_attention(model.random_sequences(3, 300, seed).batch(parts), CUDA)


@all_models
@few
@given(parts=kernels.ragged(), seed=st.integers(0, 2**31))
def test_attention_of_trees_is_the_reference_s(model: Model, parts: list[Part], seed: int) -> None:
    kernels.check_attention(model.random_sequences(3, 300, seed).batch(parts, kernels.trees(parts, seed)), CUDA)


@all_models
@few
@given(parts=st.lists(tree_parts(30) | chains, min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_attention_of_draft_trees_is_the_reference_s(model: Model, parts: list[Part | TreePart], seed: int) -> None:
    kernels.check_attention(tree_batch(model.random_sequences(3, LONGEST, seed), parts), CUDA)


@few
@given(batches.attention())
def test_attention_over_any_blocks(arguments: dict[str, Tensor]) -> None:
    """Blocks and heads of all sizes; cache rows that were not written have random contents."""
    none = torch.empty(0)
    kernels.check_attention(Batch(**arguments, tree_mask=none.int(), sinks=none, scale=0.3), CUDA)


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", HALVES)
def test_attention_over_a_long_cache(dtype: torch.dtype) -> None:
    """5000 keys: chunks of two sizes, which few rows split over programs; next to a long prompt and a short request."""
    model = Model(heads=8, kv_heads=2, head_dim=128, dtype=dtype)
    sequences = model.random_sequences(3, 5000)
    for parts in ([Part(0, 4996, 4), Part(1, 30, 4)], [Part(0, 4999, 1), Part(1, 0, 600), Part(2, 258, 1)]):
        kernels.check_attention(sequences.batch(parts), CUDA)


# -- logits and draws --------------------------------------------------------------------------------------------------


@many
@given(batches.logits())
def test_logits_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    kernels.check_logits(arguments, CUDA)


@few
@given(kernels.vocabularies())
def test_logits_of_large_vocabularies_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    kernels.check_logits(arguments, CUDA)


@many
@given(st.one_of(batches.sample(), batches.sample(vocab_ids=True)))
def test_draws_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    kernels.check_sample(arguments, CUDA)


@few
@given(kernels.draws())
def test_draws_from_large_vocabularies_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    kernels.check_sample(arguments, CUDA)


@pytest.mark.memcheck
@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("vocab", [517, 32000])
def test_noise_has_the_reference_s_bits(vocab: int, own_ids: bool) -> None:
    """Noise of every token of 60 rows."""
    kernels.check_noise(60, vocab, own_ids, CUDA)


# -- acceptance and compaction -----------------------------------------------------------------------------------------


@many
@given(batches.accept())
def test_acceptance_is_the_reference_s(arguments: dict[str, Tensor]) -> None:
    kernels.check_accept(arguments, CUDA)


@many
@given(batches.compact())
def test_compaction_is_the_reference_s(arguments: dict[str, Tensor]) -> None:
    kernels.check_compact(arguments, CUDA)


@pytest.mark.memcheck
@pytest.mark.parametrize("length", [5, 64])
def test_rows_move_over_each_other(length: int) -> None:
    """Rows of several programs, with paths that reverse, rotate and thin out."""
    columns, line = 2 * length // 16 + 2, torch.arange(length)
    caches = torch.randn(2, 3 * columns + 1, 16, 8, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    arguments = {
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_tables": (torch.arange(3 * columns).flip(0) + 1).view(3, columns).to(torch.int32),
        "starts": torch.tensor([0, 3, 1], dtype=torch.int32),
        "path": torch.stack([line.flip(0), line.roll(1), line * 2]),
    }
    kernels.check_compact(arguments, CUDA)


# -- linears -----------------------------------------------------------------------------------------------------------

# Each with a bias or fp32 results, or neither, so that each is compiled in some form.
LINEARS = [
    ("plain", torch.float32, True, False),
    ("plain", torch.float16, False, False),
    ("plain", torch.bfloat16, False, True),
    ("int8", torch.bfloat16, True, False),
    ("int8", torch.float32, False, True),
    ("int4-32", torch.bfloat16, False, False),
    ("int4-64", torch.float16, True, True),
    ("int4-128", torch.float32, False, False),
    ("int8-32", torch.bfloat16, False, False),
    ("int8-64", torch.float16, True, True),
    ("int8-128", torch.float32, False, False),
    ("fp8", torch.bfloat16, True, False),
    ("fp8", torch.float16, False, True),
    ("fp8-static", torch.bfloat16, False, False),
]


@pytest.mark.parametrize(("layout", "dtype", "bias", "float_out"), LINEARS)
@few
@given(
    rows=st.sampled_from([1, 4, 16, 17, 64, 65, 300]),
    width=st.sampled_from([31, 64, 130, 4096]) | st.integers(1, 300),
    depth=st.sampled_from([16, 129, 512, 1030, 4096]),
)
def test_products_are_the_reference_s(
    layout: str, dtype: torch.dtype, bias: bool, float_out: bool, rows: int, width: int, depth: int
) -> None:
    layer = Layer.random(layout, dtype, width, depth)
    added = torch.randn(width).to(dtype) if bias else None
    kernels.check_linear(layer, random_rows(dtype, rows, layer.depth), added, float_out, CUDA)


@pytest.mark.memcheck
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [3, 130])
def test_products_with_edges(layout: str, rows: int) -> None:
    """Numbers of rows, columns and inputs that fill no tile."""
    layer = Layer.random(layout, torch.bfloat16, 4999, 1000)
    kernels.check_linear(layer, random_rows(torch.bfloat16, rows, layer.depth), None, False, CUDA)


@pytest.mark.memcheck
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("depth", [100, 2048])
def test_rows_of_a_matrix_are_the_reference_s(layout: str, depth: int) -> None:
    ids = torch.randint(517, (33,), generator=torch.Generator().manual_seed(depth))
    for dtype in HALVES if layout not in GROUPS else HALVES[:1]:
        kernels.check_embedding(Layer.random(layout, dtype, 517, depth), ids, CUDA)
        kernels.check_embedding(Layer.random(layout, dtype, 517, depth), ids[:0], CUDA)
