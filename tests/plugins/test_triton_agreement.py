"""Reference, C++ kernels and Triton kernels agree: the same bits of noise, and the same tokens after the filters.

The Triton kernels run in Triton's interpreter, which takes some 60 ms per row. TRTSPEC_ROWS is the number of rows whose
tokens are compared, 500 if it is not set.
"""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs kernels on the CPU: make test", allow_module_level=True)

import triton
import triton.language as tl
from trtspec_plugins.triton import accept as triton_accept
from trtspec_plugins.triton import compact as triton_compact
from trtspec_plugins.triton import logits as triton_logits
from trtspec_plugins.triton import sample as triton_sample
from trtspec_plugins.triton.sample import _gumbel, own_noise

import trtspec.ops
from tests.plugins.interpreter import fast_interpreter  # noqa: F401
from trtspec.ops import gumbel_noise
from trtspec.ops import logits as reference_logits
from trtspec.ops import sample as reference_sample

ROWS = int(os.environ.get("TRTSPEC_ROWS", "500"))
FORMS = {
    "reference": (reference_logits._reference, reference_sample._reference),
    "triton": (triton_logits.process_logits, triton_sample.spec_sample),
}
if "cpu" in trtspec.ops.load_plugins():
    FORMS["cpu"] = (trtspec.ops.process_logits, trtspec.ops.spec_sample)
NONE = torch.empty(0, dtype=torch.int64)
INT, FLOAT = torch.empty(0, dtype=torch.int32), torch.empty(0)


LAUNCHERS = {
    "process_logits": triton_logits.process_logits,
    "spec_sample": triton_sample.spec_sample,
    "spec_accept": triton_accept.spec_accept,
    "kv_compact_": triton_compact.kv_compact_,
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_take_the_op_s_arguments_in_its_order(name: str) -> None:
    """Launchers take the arguments in the op's order, so that they can be registered for it."""
    wanted = [argument.name for argument in getattr(torch.ops.trtspec, name).default._schema.arguments]
    assert list(inspect.signature(LAUNCHERS[name]).parameters) == wanted


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@triton.jit
def gumbel_kernel(words, noise, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(noise + i, _gumbel(tl.load(words + i).to(tl.uint32)))


def test_noise_of_every_word_has_the_reference_s_bits() -> None:
    """Noise has the reference's bits for all 2^23 values of u, by the reference's steps from u on."""
    value = torch.arange(2**23)
    noise = torch.empty(2**23)
    gumbel_kernel[(8,)](value << 9, noise, BLOCK=2**20, enable_fp_fusion=False)
    u = (value.float() + 0.5) * 2.0**-23
    wanted = -reference_sample._log(-reference_sample._log(u))
    assert torch.equal(bits(noise), bits(wanted))


@triton.jit
def noise_kernel(seeds, positions, ids, noise, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, t = tl.load(seeds + i), tl.load(positions + i)
    tl.store(noise + i, own_noise(tl.load(ids + i), seed.to(tl.uint32), (seed >> 32).to(tl.uint32), t))


def test_noise_of_seeds_and_positions_has_the_reference_s_bits() -> None:
    """Noise has the reference's bits for 16384 seeds and positions of all sizes, with eight ids each."""
    rows, g = 2**14, torch.Generator().manual_seed(0)
    ids = torch.tensor([0, 1, 2, 3, 4, 127_999, 262_143, 2**31 - 2])
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g) >> torch.randint(0, 63, (rows,), generator=g)
    positions = torch.randint(0, 2**63 - 1, (rows,), generator=g) >> torch.randint(0, 63, (rows,), generator=g)
    assert (seeds < 0).sum() > 5000
    assert (positions >= 2**32).sum() > 5000
    noise = torch.empty(rows, len(ids))
    spread = [value[:, None].expand(noise.shape).contiguous() for value in (seeds, positions)]
    noise_kernel[(1,)](*spread, ids.repeat(rows, 1), noise, BLOCK=noise.numel(), enable_fp_fusion=False)
    assert torch.equal(bits(noise), bits(gumbel_noise(seeds, positions, ids)))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_one_bit_of_noise_decides(form: str, own: bool) -> None:
    """The logits cancel each column's noise, but one is off by an ulp, so that another bit gives another draw."""
    rows, vocab, g = 60, 517, torch.Generator().manual_seed(1)
    ids = torch.randperm(3 * vocab, generator=g)[:vocab] if own else torch.arange(vocab)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions = torch.randint(0, 2**40, (rows,), generator=g)
    logits = -gumbel_noise(seeds, positions, ids)
    column = torch.randint(0, vocab, (rows,), generator=g)
    logits[range(rows), column] = logits[range(rows), column].nextafter(torch.tensor(float("inf")))
    drawn = FORMS[form][1](logits, torch.zeros(rows, dtype=torch.bool), seeds, positions, ids if own else NONE)
    assert torch.equal(drawn, ids[column])


def random_rows(batch: int, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Arguments of process_logits, and those of spec_sample after the logits.

    Rows range from flat to peaked, and each filter is on in some of them.
    """
    g = torch.Generator().manual_seed(batch)
    vocab = int(torch.randint(300, 1000, (), generator=g))

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=g)]

    logits = torch.randn(rows, vocab, generator=g) * pick(0.1, 1, 3, 10)[:, None]
    logits[range(rows), torch.randint(vocab, (rows,), generator=g)] += pick(0, 0, 5, 20)
    logits = torch.where(pick(0, 0, 0, 1)[:, None] > 0, (logits * 4).round() / 4, logits)  # ties
    positions = torch.randint(0, 9, (rows,), generator=g)
    arguments = [
        logits, positions, INT, INT, FLOAT, INT, FLOAT,
        torch.randint(-1, vocab, (rows, 3), generator=g, dtype=torch.int32),
        torch.randint(0, 9, (rows, 3), generator=g),
        INT,
        pick(0, 0.5, 0.7, 1, 1.5),
        pick(0, 0, 0, 5, 50).int(),
        pick(1, 1, 1, 0.5, 0.95),
        pick(0, 0, 0, 0.02, 0.3),
    ]  # fmt: skip
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    return arguments, [arguments[10] <= 0, seeds, positions << 31, NONE]


@pytest.mark.parametrize("batch", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, -(-ROWS // 250)))])
def test_tokens_are_the_same(batch: int) -> None:
    """All forms draw the same tokens for 250 rows, after bans, temperature, top-k, top-p and min-p."""
    filters, draw = random_rows(batch, 250)
    tokens = {name: sample(process(*filters), *draw) for name, (process, sample) in FORMS.items()}
    assert (tokens["reference"] < filters[0].shape[1]).all()
    for name, drawn in tokens.items():
        assert (drawn != tokens["reference"]).nonzero().tolist() == [], name
