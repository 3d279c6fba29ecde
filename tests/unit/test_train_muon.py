"""Muon in fp32 takes torch's own steps, except for the rounding of torch's bf16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trtspec.train.muon import Muon, orthogonal

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Take six steps, on gradients that are the same every time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((24, 40), (40, 24), (16, 16))]


def test_a_step_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step equals torch's to the last bit if torch is given our arithmetic, and is near torch's own otherwise."""
    ours, theirs = parameters(), parameters()
    options = {"lr": 0.02, "weight_decay": 0.1}
    mine = Muon(ours, dtype=torch.float32, **options)
    steps(mine, ours)
    steps(torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options), theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=6 * 0.02 * 0.02, rtol=0)
        assert not torch.equal(one, other)

    def in_fp32(grad: torch.Tensor, coefficients: tuple[float, float, float], count: int, eps: float) -> torch.Tensor:
        return orthogonal(grad, coefficients)

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_fp32)
    same = parameters()
    steps(torch.optim.Muon(same, adjust_lr_fn="match_rms_adamw", **options), same)
    for one, other in zip(ours, same, strict=True):
        assert torch.equal(one, other)


def test_bf16_is_torch_s() -> None:
    ours, theirs = parameters(), parameters()
    steps(Muon(ours, lr=0.02, weight_decay=0.1, dtype=torch.bfloat16), ours)
    steps(torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonal(matrix, COEFFICIENTS))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.3
