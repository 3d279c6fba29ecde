"""On a GPU a row's bits do not depend on its neighbours, on the number of rows, or on the form of the launch."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.gpu import CUDA
from tests.gpu.kernels import LAYOUTS, Layer
from tests.gpu.rows import ATTENTION_FORMS, check_attention_rows, check_linear_rows, check_logits_rows, check_tree_rows
from tests.unit.attention_cases import Model, Part, TreePart
from trtspec.ops import rms_norm, rms_norm_inline, rotate_heads, rotate_heads_inline, silu_mul, silu_mul_inline

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 4, 8, 16, 17, 64, 300, 2000)
LLAMA = {
    "1B": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
}
"""(N, K) of the linears of Llama 3."""
LM_HEADS = {"1B": (128256, 2048), "8B": (128256, 4096)}


def layer_and_rows(layout: str, width: int, depth: int, rows: int) -> tuple[Layer, torch.Tensor]:
    """A layer and rows on the GPU, in bf16."""
    layer = Layer.random(layout, torch.bfloat16, width, depth, CUDA)
    g = torch.Generator(CUDA).manual_seed(width)
    return layer, torch.randn(rows, layer.depth, generator=g, device=CUDA).bfloat16()


@pytest.mark.parametrize("name", LLAMA["8B"])
@pytest.mark.parametrize("size", LLAMA)
def test_rows_of_llama_s_linears(size: str, name: str) -> None:
    check_linear_rows(*layer_and_rows("plain", *LLAMA[size][name], max(ROWS)), ROWS)


@pytest.mark.parametrize("size", LM_HEADS)
def test_rows_of_llama_s_logits(size: str) -> None:
    check_linear_rows(*layer_and_rows("plain", *LM_HEADS[size], 300), ROWS[:-1])


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("name", ["o", "down"])
def test_rows_of_quantised_linears(name: str, layout: str) -> None:
    check_linear_rows(*layer_and_rows(layout, *LLAMA["1B"][name], max(ROWS)), ROWS)


# Heads of Llama 3's 1B and 8B; a window, softcap and sinks; fp32, whose products are not of the same kind.
MODELS = {
    "1B": Model(heads=32, kv_heads=8, head_dim=64, dtype=torch.bfloat16),
    "8B": Model(heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16),
    "options": Model(heads=6, kv_heads=2, head_dim=80, dtype=torch.float16, window=300, softcap=20.0, sinks=True),
    "fp32": Model(heads=4, kv_heads=2, head_dim=64, dtype=torch.float32),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_attention(name: str) -> None:
    """Generations with 3 drafts and without, next to a prompt of 300 rows and a request with four times the keys."""
    parts = [Part(0, 700, 4), Part(1, 0, 300), Part(2, 2900, 1), Part(0, 255, 40)]
    picked = [(0, 0), (0, 3), (1, 0), (1, 1), (1, 17), (1, 255), (1, 256), (1, 299), (2, 0), (3, 0), (3, 1), (3, 39)]
    check_attention_rows(MODELS[name], parts, picked, CUDA, ATTENTION_FORMS)


@pytest.mark.memcheck
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("start", [0, 250, 2000])
def test_nodes_of_draft_trees(name: str, start: int) -> None:
    tree = TreePart(0, start, (-1, -1, 0, 1, 1, 3, 5, 5, 2))
    check_tree_rows(MODELS[name], tree, CUDA, ATTENTION_FORMS)


@pytest.mark.parametrize(("vocab", "rows"), [(1000, 40), (128256, 9)])
def test_rows_of_filters_and_draws(vocab: int, rows: int) -> None:
    check_logits_rows(vocab, rows, CUDA)


@pytest.mark.parametrize("size", [64, 2048, 4096])
def test_rows_of_norms(size: int) -> None:
    """Rows also equal the reference's, up to a rounding or two."""
    g = torch.Generator(CUDA).manual_seed(size)
    x, weight = (torch.randn(*shape, size, generator=g, device=CUDA).bfloat16() for shape in ((max(ROWS),), ()))
    whole = rms_norm(x, weight, 1e-5)
    for rows in ROWS:
        assert torch.equal(rms_norm(x[:rows], weight, 1e-5), whole[:rows])
        assert torch.equal(rms_norm(x[rows - 1 : rows], weight, 1e-5), whole[rows - 1 : rows])
    torch.testing.assert_close(whole.cpu(), rms_norm_inline(x.cpu(), weight.cpu(), 1e-5), rtol=2**-6, atol=0)


@pytest.mark.parametrize("size", [100, 8192])
def test_rows_of_gated_units(size: int) -> None:
    """Rows also equal the reference's, up to a rounding or two."""
    g = torch.Generator(CUDA).manual_seed(size)
    x = torch.randn(max(ROWS), 2 * size, generator=g, device=CUDA).bfloat16()
    whole = silu_mul(x)
    for rows in ROWS:
        assert torch.equal(silu_mul(x[:rows]), whole[:rows])
        assert torch.equal(silu_mul(x[rows - 1 : rows]), whole[rows - 1 : rows])
    torch.testing.assert_close(whole.cpu(), silu_mul_inline(x.cpu()), rtol=2**-6, atol=0)


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 8, 64), (7, 1, 20), (3, 3, 128)])
def test_rotated_heads_have_the_reference_s_bits(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    g = torch.Generator(CUDA).manual_seed(size)
    qkv = torch.randn(37, heads + 2 * kv_heads, size, generator=g, device=CUDA).to(dtype)
    cos, sin = torch.randn(2, 37, 1, size, generator=g, device=CUDA).to(dtype)
    given = qkv[:, :heads], qkv[:, heads : heads + kv_heads], cos, sin
    wanted = rotate_heads_inline(*(tensor.cpu() for tensor in given))
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(rotate_heads(*given), wanted, strict=True))
