"""process_logits with biases and penalties in one launch, in Triton's interpreter, against the reference."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels on the CPU: make test", allow_module_level=True)

from trtspec_plugins.triton.constraints import process_constrained_logits_kernel
from trtspec_plugins.triton.logits import process_rows

from tests.contract import batches
from tests.plugins import references
from tests.plugins.interpreter import fast_interpreter  # noqa: F401

_GROUPS = ("temperatures", "top_ks", "top_ps", "min_ps")


def launch(arguments: dict[str, Tensor], lanes: int = 32) -> Tensor:
    """Launch the kernel as aot.py does. Constraints that are not in use have R rows without elements."""
    R, V = arguments["logits"].shape
    sizes = {name: arguments[name].shape[1] for name in ("history", "penalties", "bias_ids", "ban_ids", "allow_mask")}
    out = torch.full((R, V), float("nan"))  # arbitrary contents, as in a GPU's memory
    process_constrained_logits_kernel[(R,)](
        *arguments.values(), V, sizes["history"], sizes["penalties"], sizes["bias_ids"], sizes["ban_ids"],
        arguments["ban_ids"].shape[0], sizes["allow_mask"], *(arguments[name].shape[0] for name in _GROUPS), out,
        LANES=lanes,
    )  # fmt: skip
    return out


@settings(deadline=None, max_examples=40)
@given(batches.constrained_logits())
def test_logits_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    """Constraints have the reference's bits; what follows them is what process_rows does without constraints."""
    constraints = ("history", "prompt_lens", "penalties", "bias_ids", "bias_values")
    groups = {name: value for name, value in arguments.items() if name not in constraints}
    allow_mask = groups["allow_mask"] if groups["allow_mask"].numel() else torch.empty(0, dtype=torch.int32)
    unfiltered = arguments | {name: torch.empty(0, dtype=torch.int32) for name in _GROUPS}
    unfiltered |= {"ban_ids": arguments["ban_ids"][:, :0], "allow_mask": arguments["allow_mask"][:, :0]}
    constrained = references.reference("process_logits", **unfiltered)
    assert torch.equal(launch(unfiltered), constrained)
    assert torch.equal(launch(arguments), process_rows(**groups | {"logits": constrained, "allow_mask": allow_mask}))


def test_one_row_of_many_is_penalised() -> None:
    """A row's result does not depend on what the other rows ask for; every count and every token of it matters."""
    R, V = 3, 700
    g = torch.Generator().manual_seed(0)
    empty = {name: torch.empty(0, dtype=dtype) for name, dtype in batches.LOGITS.items()}
    penalties = torch.tensor([[1.0, 0.0, 0.0], [1.3, 0.5, 0.25], [1.0, 0.0, 0.125]])
    history = torch.randint(-1, 40, (R, 300), generator=g, dtype=torch.int32)
    arguments = empty | {
        "logits": torch.randn(R, V, generator=g) * 4,
        "positions": torch.zeros(R, dtype=torch.int64),
        "history": history,
        "prompt_lens": torch.tensor([5, 100, 0]),
        "penalties": penalties,
        "bias_ids": torch.tensor([[-1, -1], [3, 699], [600, -1]], dtype=torch.int32),
        "bias_values": torch.tensor([[0.0, 0.0], [7.0, -7.0], [1.5, 0.0]]),
        "ban_ids": torch.empty(0, 0, dtype=torch.int32),
        "ban_until": torch.empty(0, 0, dtype=torch.int64),
        "allow_mask": torch.empty(R, 0, dtype=torch.int32),
    }
    got = launch(arguments)
    assert torch.equal(got, references.reference("process_logits", **arguments))
    assert torch.equal(got[0], arguments["logits"][0])
    assert (got[1:] != arguments["logits"][1:]).sum() > 50
    for r in range(R):
        alone = {name: value[r : r + 1] if len(value) == R else value for name, value in arguments.items()}
        assert torch.equal(launch(alone), got[r : r + 1])


@settings(deadline=None, max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_no_metadata_leads_past_the_row(data: st.DataObject) -> None:
    """No metadata leads past the row: the kernel's rows lie between two rows, walls, which it must not change."""
    R, V, L, N = 2, 37, 9, 5
    ids = st.integers(-(2**31), 2**31 - 1) | st.integers(-40, 2 * V)
    bits = st.integers(-(2**31), 2**31 - 1)

    def draw(of: st.SearchStrategy[int], *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.tensor([data.draw(of) for _ in range(count)]).view(shape)

    def floats(*shape: int) -> Tensor:
        return draw(bits, *shape).to(torch.int32).view(torch.float32)

    guarded = torch.full((R + 2, V), 7.0)
    x = torch.full((R + 2, V), float("nan"))
    x[1:-1] = floats(R, V)
    words = data.draw(st.sampled_from([0, 1, 2, 3]))
    process_constrained_logits_kernel[(R,)](
        x[1:], draw(ids, R), draw(ids, R, L).to(torch.int32), draw(ids, R), floats(R, 3),
        draw(ids, R, N).to(torch.int32), floats(R, N), draw(ids, R, 1).to(torch.int32), draw(ids, R, 1),
        draw(bits, R, 2).to(torch.int32), floats(R), draw(ids, R).to(torch.int32), floats(R), floats(R),
        V, L, 3, N, 1, R, words, R, R, R, R, guarded[1:], LANES=32,
    )  # fmt: skip
    assert (guarded[0] == 7).all()
    assert (guarded[-1] == 7).all()
