"""Muon in the dtype that the CPU computes fast in.

torch's Muon always computes in bf16. Without CPU instructions for bf16, its step then costs more than all the rest of
the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STEPS = 5
"""Number of Newton-Schulz iterations."""


class Muon(torch.optim.Muon):
    """A Muon optimizer: torch's, with updates of the size of AdamW's ("match_rms_adamw").

    dtype: dtype of the Newton-Schulz iterations.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw", ns_steps=STEPS)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step of Muon on the present gradients. closure: as for torch's Muon, in bf16 only."""
        if self.dtype == torch.bfloat16:
            found: Any = super().step(closure)  # type: ignore[no-untyped-call]
            return None if found is None else float(found)
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return None

    def _move(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state, grad, lr = self.state[parameter], parameter.grad, group["lr"]
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        average = state["momentum_buffer"]
        average.lerp_(grad, 1.0 - group["momentum"])
        towards = orthogonal(grad.lerp(average, group["momentum"]).to(self.dtype), group["ns_coefficients"])
        parameter.mul_(1.0 - lr * group["weight_decay"])
        parameter.add_(towards.to(parameter.dtype), alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """Return about U V^T of the singular value decomposition of `matrix` [N, M].

    It is computed by Newton-Schulz iterations of the fifth order.
    """
    a, b, c = coefficients
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x: Tensor = wide / wide.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
