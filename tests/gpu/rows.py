"""Checks that a row's bits do not depend on other rows, in either form of a kernel that has two forms.

test_rows.py calls these checks for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from tests.gpu.kernels import NO_IDS, Layer, complete, on, place, same
from tests.unit.attention_cases import Model, Part, Sequences, TreePart, chain_batch, tree_batch

Form = Callable[[], object]
"""A function that makes a context in which kernels are launched in one form."""


@contextmanager
def attention_form(split: bool) -> Iterator[None]:
    """Make attention of any size split over its keys, or not."""
    import trtspec_plugins.triton.attention as kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SPLIT_BELOW", 1 << 30 if split else 0)
        yield


ATTENTION_FORMS: tuple[Form, ...] = (lambda: attention_form(False), lambda: attention_form(True))
ANY_FORM: tuple[Form, ...] = (nullcontext,)


def run(sequences: Sequences, parts: Sequence[Part], device: torch.device) -> list[Tensor]:
    """Outputs of each part, [num_rows, Hq, D]."""
    out = place(sequences.batch(parts), device).run().cpu()
    return list(out.split([part.num_rows for part in parts]))


def check_attention_rows(
    model: Model, parts: Sequence[Part], picked: Sequence[tuple[int, int]], device: torch.device, forms: Sequence[Form]
) -> None:
    """Check that rows `picked` (index of a part, row of it) of a batch have the same bits in other batches.

    One such batch has only the row, as the one new row of a request whose other tokens are in the cache. In another one
    the row is the last of a few drafts. All forms are checked.
    """
    longest = max(part.end for part in parts)
    sequences = model.random_sequences(1 + max(part.sequence for part in parts), longest)
    wanted: list[Tensor] | None = None
    for form in forms:
        with form():  # type: ignore[attr-defined]
            whole = run(sequences, parts, device)
            wanted = whole if wanted is None else wanted
            assert all(map(same, whole, wanted))
            for index, row in picked:
                part = parts[index]
                at = part.start + row
                few = min(4, at + 1)
                (alone,) = run(sequences, [Part(part.sequence, at, 1)], device)
                (drafted,) = run(sequences, [Part(part.sequence, at + 1 - few, few)], device)
                assert same(alone[0], wanted[index][row]), f"{model}: row {row} of part {index} alone"
                assert same(drafted[-1], wanted[index][row]), f"{model}: row {row} of part {index} after 3 others"


def check_tree_rows(model: Model, tree: TreePart, device: torch.device, forms: Sequence[Form]) -> None:
    """Check that every node of a tree, next to a chain, has the bits of its path as a chain, in all forms."""
    sequences = model.random_sequences(2, tree.part.end)
    for form in forms:
        with form():  # type: ignore[attr-defined]
            out = place(tree_batch(sequences, [tree, Part(1, 5, 3)]), device).run().cpu()
            for node in range(-1, len(tree.parents)):
                alone = place(chain_batch(sequences, tree, node), device).run().cpu()
                assert same(out[1 + node], alone[0]), f"{model}: node {node}"


def check_linear_rows(layer: Layer, x: Tensor, counts: Sequence[int]) -> None:
    """Check that the first `count` rows, and the first and the last of them alone, give the same as among all rows.

    x: [T, K], on the device of the matrix.
    """
    whole = layer(x)
    for count in counts:
        name = f"{layer.layout} [{layer.width}, {layer.depth}]: {count} rows"
        assert torch.equal(layer(x[:count]), whole[:count]), name
        for row in (0, count - 1):
            assert torch.equal(layer(x[row : row + 1]), whole[row : row + 1]), f"{name}, row {row} alone"


def check_logits_rows(vocab: int, rows: int, device: torch.device) -> None:
    """Check filters and draws of rows that differ in everything: alone, and among others in either order."""
    g = torch.Generator().manual_seed(vocab)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=g)]

    given = complete(
        {
            "logits": torch.randn(rows, vocab, generator=g) * pick(0.1, 1.0, 5.0)[:, None],
            "positions": torch.randint(0, 9, (rows,), generator=g),
            "ban_ids": torch.randint(-1, vocab, (rows, 3), generator=g, dtype=torch.int32),
            "ban_until": torch.randint(0, 9, (rows, 3), generator=g),
            "temperatures": pick(0.0, 0.7, 1.0),
            "top_ks": pick(0, 1, 50).to(torch.int32),
            "top_ps": pick(0.3, 0.9, 1.0),
            "min_ps": pick(0.0, 0.05),
        }
    )
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    there = [on(device, tensor) for tensor in (*given.values(), seeds)]

    def results(order: Tensor) -> tuple[Tensor, Tensor]:
        order = order.to(device)
        taken = [tensor[order] if tensor.numel() else tensor for tensor in there]
        kept = torch.ops.trtspec.process_logits(*taken[:-1])
        greedy = taken[10] <= 0
        ids = torch.ops.trtspec.spec_sample(kept, greedy, taken[-1], taken[1] << 31, NO_IDS.to(device))
        return kept.cpu(), ids.cpu()

    order = torch.arange(rows)
    kept, ids = results(order)
    for other in (order.flip(0), order[::2], *order[:, None]):
        some_kept, some_ids = results(other)
        assert same(some_kept, kept[other])
        assert torch.equal(some_ids, ids[other])
