"""Products are right. A row has the same bits whatever is computed with it, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trtspec.ops.products import product, products

ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 31, 64, 100, 130)


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def cancelling(rows: int, depth: int, width: int, *batch: int) -> tuple[Tensor, Tensor]:
    """x and y whose terms cancel in pairs: what is left shows the order of the additions."""
    generator = torch.Generator().manual_seed(depth * width)
    x, y = torch.randn(*batch, rows, depth, generator=generator), torch.randn(*batch, width, depth, generator=generator)
    half = depth // 2
    x[..., half : 2 * half] = x[..., :half].flip(-1)
    y[..., half : 2 * half] = -y[..., :half].flip(-1)
    return x, y


@pytest.mark.parametrize(("depth", "width"), [(20, 3), (128, 256), (896, 256), (256, 2048), (4864, 64), (4864, 1)])
def test_a_row_has_the_same_bits_among_any_others(threads: int, depth: int, width: int) -> None:
    x, y = cancelling(ROWS[-1], depth, width)
    whole = product(x, y)
    torch.testing.assert_close(whole.double(), x.double() @ y.double().T, rtol=0, atol=1e-5 * depth)
    for rows in ROWS:
        assert torch.equal(product(x[:rows], y), whole[:rows]), rows
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert torch.equal(product(x[order], y), whole[order])


@pytest.mark.parametrize(("depth", "width"), [(128, 256), (256, 128), (256, 16)])
def test_each_product_is_as_if_it_were_the_only_one(threads: int, depth: int, width: int) -> None:
    """Products in attention's shapes, queries with keys and weights with values, do not depend on each other."""
    x, y = cancelling(64, depth, width, 2, 3)
    whole = products(x, y)
    assert whole.shape == (2, 3, 64, width)
    for rows in (4, 8, 24, 64):
        for i, j in ((0, 0), (1, 2)):
            assert torch.equal(product(x[i, j, :rows], y[i, j]), whole[i, j, :rows])
    assert torch.equal(
        products(x[:, :1], y), torch.stack([products(x[:, :1], y[:, j : j + 1])[:, 0] for j in range(3)], 1)
    )
