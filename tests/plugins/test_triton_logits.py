"""The Triton kernels of process_logits against the reference, in Triton's interpreter (make test).

The tokens that top-p and min-p keep may differ where a token is within rounding errors of the edge, as the reference's
sums are rounded. They must lie between those that the reference keeps with p a little lower and a little higher. All
else is equal bit for bit. Here each row has its own program; test_triton_spread.py compares rows that are spread over
programs with them.
"""

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

from trtspec_plugins.triton.logits import LANES, process_logits_kernel, process_rows

from tests.contract import batches
from tests.plugins import references
from tests.plugins.interpreter import fast_interpreter  # noqa: F401

BLOCK = 4 * LANES  # tokens of a long row that a program tallies at a time
INF, NAN = float("inf"), float("nan")
DTYPES = {
    "logits": torch.float32,
    "positions": torch.int64,
    "ban_ids": torch.int32,
    "ban_until": torch.int64,
    "allow_mask": torch.int32,
    "temperatures": torch.float32,
    "top_ks": torch.int32,
    "top_ps": torch.float32,
    "min_ps": torch.float32,
}
UNUSED = ("history", "prompt_lens", "penalties", "bias_ids", "bias_values")


def complete(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add zero-size tensors for the arguments that are not named."""
    R = arguments["logits"].shape[0]
    shapes = {"positions": (R,), "ban_ids": (0, 0), "ban_until": (0, 0)}
    blank = {name: torch.zeros(shapes.get(name, (0,)), dtype=dtype) for name, dtype in DTYPES.items()}
    return blank | {name: value.to(DTYPES[name]) for name, value in arguments.items()}


def reference(arguments: dict[str, Tensor]) -> Tensor:
    return references.reference("process_logits", **complete(arguments), **dict.fromkeys(UNUSED, torch.empty(0)))


def nudged(arguments: dict[str, Tensor], nudge: float) -> Tensor:
    """Return the reference's result with changed top-p and min-p; they keep more if nudge > 0."""
    changed = dict(arguments)
    for name, off, change in (("top_ps", 1.0, nudge), ("min_ps", 0.0, -nudge)):
        value = changed[name]
        changed[name] = torch.where(value == off, off, value + change)
    return reference(changed)


def check(arguments: dict[str, Tensor], nudge: float = 1e-5) -> Tensor:
    """Check the kernel's result against the reference -> result."""
    arguments = complete(arguments)
    got, fewer, more = process_rows(**arguments), nudged(arguments, -nudge), nudged(arguments, nudge)
    assert ((got != -INF) | (fewer == -INF)).all()
    assert ((got == -INF) | (got == more) | (got.isnan() & more.isnan())).all()
    return got


@settings(deadline=None, max_examples=60)
@given(batches.logits())
def test_logits_are_the_reference_s(arguments: dict[str, Tensor]) -> None:
    check(arguments)


def spread(seed: int, rows: int, vocab: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@st.composite
def awkward(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draw all groups at once, for rows with ties, zeros of both signs, infinities, NaN and removed tokens."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, vocab = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 50, 257]))
    x = spread(draw(st.integers(0, 99)), rows, vocab, draw(st.sampled_from([0.01, 3.0, 1e4, 1e37])))
    if draw(st.booleans()):
        x = (x / 2).round()  # ties
    x = torch.where(torch.rand(x.shape, generator=g) < draw(st.sampled_from([0.0, 0.3])), -x * 0, x)
    x[torch.rand(x.shape, generator=g) < draw(st.sampled_from([0.0, 0.3, 0.97]))] = -INF
    for row in range(rows):
        special = draw(st.sampled_from([None, None, NAN, -NAN, INF, -INF]))
        if special is not None:
            x[row, torch.rand(vocab, generator=g) < (1.1 if special == -INF else 0.1)] = special

    def column(values: list[float]) -> Tensor:
        return torch.tensor([draw(st.sampled_from(values)) for _ in range(rows)])

    bans = draw(st.sampled_from([0, 1, 40]))
    return {
        "logits": x,
        "positions": torch.randint(0, 9, (rows,), generator=g),
        "ban_ids": torch.randint(-1, vocab, (rows, bans), generator=g),
        "ban_until": torch.randint(0, 9, (rows, bans), generator=g),
        "temperatures": column([-1.0, 0.0, 0.3, 1.0, 7.0, INF, NAN]),
        "top_ks": column([-5, 0, 1, 2, 9, vocab - 1, vocab, vocab + 1, 2**31 - 1]),
        "top_ps": column([-1.0, 0.0, 1e-6, 0.2, 0.7, 0.99, 0.9999999, 1.0, 2.0, NAN]),
        "min_ps": column([-1.0, 0.0, 1e-9, 0.03, 0.4, 1.0, 2.0, NAN]),
    }


@settings(deadline=None, max_examples=120)
@given(awkward(), st.sets(st.sampled_from(["ban_ids", "temperatures", "top_ks", "top_ps", "min_ps"])))
def test_whatever_the_row_and_the_groups(arguments: dict[str, Tensor], without: set[str]) -> None:
    if "ban_ids" in without:
        without = without | {"ban_until"}
    check({name: value for name, value in arguments.items() if name not in without})


def ramp(rows: int, vocab: int) -> Tensor:
    """Return different logits, shuffled over the row."""
    order = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(row)) for row in range(rows)])
    return order * (12.0 / vocab)


@pytest.mark.parametrize("vocab", [BLOCK - 1, BLOCK, 16 * BLOCK + 17])
def test_rows_of_several_blocks(vocab: int) -> None:
    """Rows of several blocks have the reference's tokens; without ties, these can be counted."""
    x = ramp(4, vocab)
    bans = torch.stack([x[:2].argmax(1), torch.tensor([vocab - 1, 0])]).T.repeat(2, 1)
    groups = {
        "temperatures": torch.tensor([1.0, 0.7, 0.0, 1.3]),
        "top_ks": torch.tensor([50, vocab - 3, 1, 0]),
        "ban_ids": bans,
        "ban_until": torch.full((4, 2), 2**40),
    }
    got = check({"logits": x, **groups})
    assert torch.equal(got, reference({"logits": x, **groups}))
    assert (got > -INF).sum(1).tolist()[::2] == [50, 1]
    got = check({"logits": x, "top_ps": torch.tensor([0.9, 0.1, 0.0, 0.9999])})
    assert (got > -INF).any(1).all()
    check({"logits": x, **groups, "top_ps": torch.tensor([0.9, 0.3, 1.0, 0.5]), "min_ps": torch.full((4,), 0.01)})


def test_no_group_changes_nothing() -> None:
    x = spread(0, 3, 50)
    zeros = torch.zeros(3)
    off = {"temperatures": zeros, "top_ks": zeros, "top_ps": zeros + 1, "min_ps": zeros}
    for groups in ({}, off, off | {"top_ks": zeros + 50}, off | {"top_ks": zeros + 2**30, "temperatures": zeros - 1}):
        assert torch.equal(check({"logits": x, **groups}), x)


def test_ties_with_the_kth_and_the_most_likely_stay() -> None:
    x = torch.full((2, 2 * BLOCK), -3.0)
    x[0, ::1000], x[0, 5] = 0.0, 1.0
    x[0, 1000] = -0.0
    x[1, 3], x[1, BLOCK + 3] = 2.0, 2.0
    got = check({"logits": x, "top_ks": torch.tensor([2, 1])})
    assert torch.equal(got > -INF, x > -1)
    got = check({"logits": x, "top_ps": torch.zeros(2)})
    assert torch.equal(got > -INF, x == x.amax(1, keepdim=True))
    got = check({"logits": x, "top_ks": torch.tensor([2, 2]), "top_ps": torch.full((2,), 0.9)})
    assert torch.equal(got > -INF, x > -1)  # a tie is kept or removed as a whole; zeros of both signs tie


@pytest.mark.parametrize("first", [*(pytest.param(x, marks=pytest.mark.long) for x in (1.0, -1.0)), -1e-44])
def test_logits_that_are_each_other_s_next(first: float) -> None:
    """Among 24 adjacent floats, also through zero, top-k keeps k tokens, and p a little below k/24 keeps k.

    Both together also keep k, where p keeps all that k has left.
    """
    chain = [torch.tensor(first)]
    for _ in range(23):
        chain.append(chain[-1].nextafter(torch.tensor(INF)))
    x, k = torch.stack(chain).repeat(24, 1), torch.arange(1, 25)
    for groups in ({"top_ks": k}, {"top_ps": k / 24 - 0.02}, {"top_ks": k, "top_ps": torch.full((24,), 0.999)}):
        got = check({"logits": x, **groups})
        assert (got > -INF).sum(1).tolist() == k.tolist()


def test_top_p_s_mass_is_of_what_top_k_left() -> None:
    """Top-p's mass is that of the tokens that top-k left.

    Of 0.4, 0.3, 0.2 and 0.1, p = 0.5 keeps two. Of the two most likely, 4/7 and 3/7, it keeps one.
    """
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(2, 1)
    got = check({"logits": x, "top_ks": torch.tensor([0, 2]), "top_ps": torch.full((2,), 0.5)})
    assert (got > -INF).sum(1).tolist() == [2, 1]


def test_min_p_is_relative_to_the_most_likely() -> None:
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(4, 1)
    got = check({"logits": x, "min_ps": torch.tensor([0.3, 0.6, 0.9, 1.5])})
    assert (got > -INF).sum(1).tolist() == [3, 2, 1, 0]


def test_bans_end_at_their_position() -> None:
    x = torch.zeros(3, 40)
    ids, until = torch.tensor([[3, -1, 39]]).repeat(3, 1), torch.tensor([[5, 9, 6]]).repeat(3, 1)
    got = check({"logits": x, "positions": torch.tensor([4, 5, 6]), "ban_ids": ids, "ban_until": until})
    assert [row.tolist() for row in (got[0] == -INF).nonzero()] == [[3], [39]]
    assert [row.tolist() for row in (got[1] == -INF).nonzero()] == [[39]]
    assert torch.equal(got[2], x[2])


def everything(rows: int) -> dict[str, Tensor]:
    return {
        "temperatures": torch.full((rows,), 0.8),
        "top_ks": torch.full((rows,), 20),
        "top_ps": torch.full((rows,), 0.9),
        "min_ps": torch.full((rows,), 0.01),
    }


def test_rows_without_an_answer_keep_having_none() -> None:
    """Rows without an answer keep having none, and their neighbour has the bits that it has alone.

    They are infinite and NaN rows, and one whose tokens are all banned.
    """
    x = spread(3, 6, 50)
    x[0, 7], x[1], x[2, 9], x[3] = NAN, -INF, INF, NAN
    ids, until = torch.arange(50).repeat(6, 1), torch.zeros(6, 50)
    until[4] = 1
    got = check({"logits": x, "ban_ids": ids, "ban_until": until, **everything(6)})
    assert got[0, 7].isnan()
    assert (got[1] == -INF).all()
    assert got[2, 9] == INF
    assert got[3].isnan().all()
    assert (got[4] == -INF).all()
    assert torch.equal(got[5:], process_rows(**complete({"logits": x[5:], **everything(1)})))
    assert 1 < (got[5] > -INF).sum() < 20


def test_a_group_that_is_too_short_is_not_read_past_its_end() -> None:
    x, R = spread(1, 3, 50), 3
    short = {name: torch.full((99,), value)[:1] for name, value in (("temperatures", 0.5), ("top_ps", 0.1))}
    short |= {name: torch.full((99,), value)[:1] for name, value in (("top_ks", 2), ("min_ps", 0.9))}
    short |= {"ban_ids": torch.zeros(9, 1)[:1], "ban_until": torch.full((9, 1), 99)[:1]}
    got = process_rows(**complete({"logits": x, **short}))
    assert torch.equal(got[1:], x[1:])
    assert 0 < (got[0] > -INF).sum() < R


@settings(deadline=None, max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_no_metadata_leads_past_the_row(data: st.DataObject) -> None:
    """No metadata leads past the row: the kernel's rows lie between two rows, walls, which it must not change."""
    R, V, M = 2, 37, 5
    ids = st.integers(-(2**31), 2**31 - 1) | st.integers(-40, 2 * V)
    bits = st.integers(-(2**31), 2**31 - 1)

    def draw(of: st.SearchStrategy[int], *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.tensor([data.draw(of) for _ in range(count)]).view(shape)

    def floats(*shape: int) -> Tensor:
        return draw(bits, *shape).to(torch.int32).view(torch.float32)

    guarded = torch.full((R + 2, V), 7.0)
    x = torch.full((R + 2, V), NAN)
    x[1:-1] = floats(R, V)
    process_logits_kernel[(R,)](
        x[1:], draw(ids, R), draw(ids, R, M).to(torch.int32), draw(ids, R, M), floats(R), draw(ids, R).to(torch.int32),
        floats(R), floats(R), V, M, R, R, R, R, R, guarded[1:], LANES=32,
    )  # fmt: skip
    assert (guarded[0] == 7).all()
    assert (guarded[-1] == 7).all()
