"""A loss over large vocabularies, computed in blocks of rows, so that no tensor is [all rows, vocabulary].

Blocks are computed one after another: each makes its logits, loss and gradients, and then frees them. What stays is the
gradient of each row's input, and the gradient of each weight, summed in fp32. The idea is that of Liger Kernel's fused
linear cross-entropy (Hsu et al., arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MOST_ROWS = 256
"""Most rows of logits at a time: 8 MiB in fp32 for a vocabulary of 8,192."""

_BLOCK_BYTES = 24 << 20  # below 32 MiB, from which on glibc requests memory from the kernel for every tensor

BlockLoss = Callable[[Tensor, Sequence[Tensor], Mapping[str, Tensor]], Tensor]
"""A function that returns one block's part of the loss: (rows, inputs, weights) -> scalar.

rows [b] int64: indices of the block's rows. inputs [b, W] each: the inputs of these rows.
"""


class SoftCrossEntropy(torch.autograd.Function):
    """A cross-entropy per row, of which `hard` is with the id `goal` and the rest with `probs`.

    logits [b, V] fp32; probs [b, V] fp32, rows of sum 1; goal [b] int64. Returns the cross-entropy [b], and whether no
    logit is above the goal's, [b]. Only the logits get gradients.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor, goal: Tensor, hard: float) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(-1)
        ctx.save_for_backward(log_probs, probs, goal)
        ctx.hard = hard
        soft = torch.bmm(probs[:, None], log_probs[..., None])[:, 0, 0]
        pick = log_probs.gather(-1, goal[:, None])[:, 0]
        right = pick >= log_probs.amax(-1)
        ctx.mark_non_differentiable(right)
        return -(hard * pick + (1.0 - hard) * soft), right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        log_probs, probs, goal = ctx.saved_tensors
        grad = log_probs.exp().sub_(probs, alpha=1.0 - ctx.hard)
        grad.scatter_add_(-1, goal[:, None], grad.new_full((len(goal), 1), -ctx.hard))
        return grad.mul_(grads[0][:, None]), None, None, None


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: BlockLoss, blocks: Sequence[Tensor], names: Sequence[str], num_inputs: int, *tensors: Tensor
    ) -> Tensor:
        inputs = [tensor.detach() for tensor in tensors[:num_inputs]]
        weights = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors[num_inputs:]]
        trained = [i for i, weight in enumerate(weights) if weight.requires_grad]
        total = torch.zeros(())
        of_inputs = [torch.zeros_like(tensor) for tensor in inputs]
        of_weights: dict[int, Tensor] = {}
        for block in blocks:
            own = [tensor[block].requires_grad_() for tensor in inputs]
            with torch.enable_grad():
                part = loss(block, own, dict(zip(names, weights, strict=True)))
            wanted = [*own, *(weights[i] for i in trained)]
            found: Sequence[Tensor | None] = torch.autograd.grad(part, wanted, allow_unused=True)
            total += part.detach()
            for whole, grad in zip(of_inputs, found, strict=False):
                if grad is not None:
                    whole[block] = grad
            for i, grad in zip(trained, found[num_inputs:], strict=True):
                if grad is not None:
                    of_weights[i] = of_weights[i].add_(grad) if i in of_weights else grad.float()
        ctx.found = [*of_inputs, *(of_weights.get(i) for i in range(len(weights)))]
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = [
            None if grad is None else grad.mul_(grads[0]).to(dtype)
            for grad, dtype in zip(ctx.found, ctx.dtypes, strict=True)
        ]
        del ctx.found
        return None, None, None, None, *found


def rows_of_logits(vocab_size: int) -> int:
    """Number of rows of logits to compute at a time."""
    return max(1, min(MOST_ROWS, _BLOCK_BYTES // (4 * vocab_size)))


def in_blocks(
    loss: BlockLoss, rows: Tensor, inputs: Sequence[Tensor], weights: Mapping[str, Tensor], size: int
) -> Tensor:
    """Return the sum of `loss` over blocks of `size` rows; a scalar, fp32.

    rows [n] int64: the rows to cover, each at most once. inputs [R, W]: each block gets its rows of each input.
    Gradients reach inputs and weights; backward runs only once.
    """
    blocks = torch.split(rows, size) if len(rows) else ()
    total: Tensor = _InBlocks.apply(  # type: ignore[no-untyped-call]
        loss, blocks, tuple(weights), len(inputs), *inputs, *weights.values()
    )
    return total
