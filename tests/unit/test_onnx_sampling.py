"""The ONNX bodies of logits, noise, the draw and acceptance, run by ONNX Runtime, against the torch references."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.slow

onnx = pytest.importorskip("onnx", reason="pip install 'trtspec[onnx]'")
ort = pytest.importorskip("onnxruntime", reason="pip install 'trtspec[onnx]'")

from onnx import helper  # noqa: E402

from tests.unit.onnx_nodes import INF, INPUTS, NAN, NO_TOKEN, _info, random_logits, run, seeds  # noqa: E402
from trtspec.backends.onnx.builder import Body  # noqa: E402
from trtspec.backends.onnx.sampling import dense_words, gumbel, words_of  # noqa: E402
from trtspec.ops import accept, gumbel_noise, logits, sample  # noqa: E402


def processed(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (our logits, the reference's).

    Groups that are not named are left out in ours and zero-size in the reference.
    """
    one_each = ("prompt_lens", "temperatures", "top_ks", "top_ps", "min_ps")
    floats = ("penalties", "bias_values", "temperatures", "top_ps", "min_ps")
    everything = []
    for name in INPUTS["ProcessLogits"]:
        dtype = torch.float32 if name in floats else torch.int64 if name == "ban_until" else torch.int32
        everything.append(tensors.get(name, torch.empty(0 if name in one_each else (0, 0), dtype=dtype)))
    return run("ProcessLogits", everything)[0], logits._reference(*everything)


@st.composite
def logits_cases(draw: st.DrawFn) -> dict[str, Tensor]:
    """Groups of process_logits in any combination. Some rows do not use them."""
    g = torch.Generator().manual_seed(draw(seeds))
    R, V = draw(st.integers(1, 5)), draw(st.sampled_from([33, 50, 64, 257]))
    use = draw(st.tuples(*[st.booleans()] * 8))

    def ids(columns: int) -> Tensor:
        return torch.randint(-1, V, (R, columns), generator=g).to(torch.int32)

    def some(values: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(R, generator=g) < 0.3, torch.full_like(values, off), values)

    x = random_logits(draw(seeds), R, V, draw(st.sampled_from([0.5, 3.0, 30.0])), draw(st.booleans()))
    case = {"logits": x, "positions": torch.randint(0, 9, (R,), generator=g)}
    if use[0]:
        case["history"], case["prompt_lens"] = ids(draw(st.integers(1, 40))), ids(1)[:, 0].clamp(min=0)
        case["penalties"] = torch.rand(R, 3, generator=g) + torch.tensor([0.5, -0.5, -0.5])
    if use[1]:
        case["bias_ids"], case["bias_values"] = ids(3), torch.randn(R, 3, generator=g)
    if use[2]:
        case["ban_ids"], case["ban_until"] = ids(4), torch.randint(0, 9, (R, 4), generator=g)
    if use[3]:
        case["allow_mask"] = torch.randint(-(2**31), 2**31, (R, -(-V // 32)), generator=g).to(torch.int32)
    if use[4]:
        case["temperatures"] = some(torch.rand(R, generator=g) + 0.3, 0.0)
    if use[5]:
        case["top_ks"] = some(torch.randint(-1, V + 3, (R,), generator=g).to(torch.int32), 0)
    if use[6]:
        case["top_ps"] = some(torch.rand(R, generator=g), 1.0)
    if use[7]:
        case["min_ps"] = some(torch.rand(R, generator=g), 0.0)
    return case


def near_a_threshold(case: dict[str, Tensor]) -> Tensor:
    """[R] bool: rows that a rounding error moves across the edge of top-p or min-p. There both results are right."""
    close = torch.zeros(len(case["logits"]), dtype=torch.bool)
    for name, off in (("top_ps", 1.0), ("min_ps", 0.0)):
        if name in case:
            variants = []
            for nudge in (-1e-5, 1e-5):
                value = torch.where(case[name] == off, off, case[name] + nudge)
                variants.append(processed({**case, name: value})[1] == -INF)
            close |= (variants[0] != variants[1]).any(1)
    return close


@settings(max_examples=80, deadline=None)
@given(case=logits_cases())
def test_logits(case: dict[str, Tensor]) -> None:
    """The same tokens are kept as in the reference, except near a threshold.

    Tokens that both keep have the same bits.
    """
    ours, expected = processed(case)
    differ = (ours != expected).any(1)
    assert not (differ & ~near_a_threshold(case)).any()
    kept = (ours > -INF) & (expected > -INF)
    assert torch.equal(ours[kept], expected[kept])


def test_logits_that_nobody_asks_anything_of() -> None:
    x = random_logits(0, 3, 50)
    positions, zeros = torch.zeros(3).long(), torch.zeros(3)
    off = {"temperatures": zeros, "top_ks": zeros.int(), "top_ps": zeros + 1, "min_ps": zeros}
    for groups in ({}, off):
        ours, _ = processed({"logits": x, "positions": positions, **groups})
        assert torch.equal(ours, x)


def test_ties_with_the_kth_and_the_most_likely_token_stay() -> None:
    x = torch.tensor([[3.0, 1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 1.0, 1.0, -INF]])
    positions = torch.zeros(2).long()
    ours, _ = processed({"logits": x, "positions": positions, "top_ks": torch.tensor([1, 3], dtype=torch.int32)})
    assert (ours > -INF).tolist() == [[True, False, True, True, False], [True, True, True, True, False]]
    ours, _ = processed({"logits": x, "positions": positions, "top_ps": torch.zeros(2)})
    assert (ours > -INF).tolist() == [[True, False, True, True, False], [True, True, False, False, False]]


@pytest.mark.parametrize("group", ["top_ks", "top_ps", "min_ps"])
def test_rows_without_an_answer_keep_having_none(group: str) -> None:
    """NaN stays NaN and a row of -inf stays one, whatever is asked. The row next to them does not change."""
    x = random_logits(3, 3, 50)
    x[0, 7], x[1] = NAN, -INF
    value = torch.full((3,), 4, dtype=torch.int32) if group == "top_ks" else torch.full((3,), 0.3)
    ours, expected = processed({"logits": x, "positions": torch.zeros(3).long(), group: value})
    assert ours[0, 7].isnan()
    assert (ours[1] == -INF).all()
    assert torch.equal(ours[2], expected[2])


@functools.cache
def noise_session(dense: bool) -> Any:
    """A session of SpecSample's noise alone, made of the nodes of its body: of all ids, or of pairs (position, id)."""
    body = Body("Noise", ("seeds", "positions", "ids"))
    s, t, v = body.inputs
    noise = gumbel(dense_words(s.at(1), t.at(1), body.Size(v).reshape(1)) if dense else words_of(s, t, v))
    function = body.function((noise,), ("noise",))
    node = helper.make_node("Noise", list(function.input), ["noise"], domain="trtspec")
    inputs = [_info(name, "<i8", 1) for name in function.input]
    graph = helper.make_graph([node], "noise", inputs, [_info("noise", "<f4", 2 if dense else 1)])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("trtspec", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[function])
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


any_int64 = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, -1, 2**32, 2**63 - 1, -(2**63)])
positions_of_draws = st.integers(0, 2**63 - 1) | st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**40 + 3])


@settings(max_examples=60, deadline=None)
@given(draws=st.lists(st.tuples(any_int64, positions_of_draws), min_size=1, max_size=6), vocab=st.integers(1, 3000))
def test_noise_has_the_same_bits(draws: list[tuple[int, int]], vocab: int) -> None:
    s, t = (torch.tensor(column) for column in zip(*draws, strict=True))
    ids = torch.arange(vocab)
    feeds = {"seeds": s.numpy(), "positions": t.numpy(), "ids": ids.numpy()}
    expected = gumbel_noise(s, t, ids)
    dense = noise_session(True).run(None, feeds)[0]
    assert np.array_equal(dense.view(np.int32), expected.view(torch.int32).numpy())
    picked = ids.flip(0)[: len(draws)] * 1000 + 2**20  # one id each, of any vocabulary
    n = len(picked)
    feeds = {"seeds": s[:n].numpy(), "positions": t[:n].numpy(), "ids": picked.numpy()}
    sparse = noise_session(False).run(None, feeds)[0]
    expected = gumbel_noise(s[:n], t[:n], picked).diagonal()
    assert np.array_equal(sparse.view(np.int32), expected.contiguous().view(torch.int32).numpy())


def test_noise_of_every_word() -> None:
    """The noise equals the reference's over so many draws that each of the 24 likely exponents of u occurs."""
    s, t, ids = torch.arange(64) * 0x9E3779B97F4A7C15 % 2**62, torch.arange(64) * 2**33 + 5, torch.arange(20000)
    feeds = {"seeds": s.numpy(), "positions": t.numpy(), "ids": ids.numpy()}
    expected = sample._dense_noise(s, t, len(ids)).numpy()
    assert expected.min() < -2.5
    assert expected.max() > 13
    assert np.array_equal(noise_session(True).run(None, feeds)[0].view(np.int32), expected.view(np.int32))


@st.composite
def sample_cases(draw: st.DrawFn) -> list[Tensor]:
    g = torch.Generator().manual_seed(draw(seeds))
    R, V = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 7, 50, 300]))
    x = random_logits(draw(seeds), R, V, tied=draw(st.booleans()))
    x[torch.rand(R, V, generator=g) < draw(st.sampled_from([0.0, 0.3, 0.95]))] = -INF
    for row in range(R):
        special = draw(st.sampled_from([None, None, None, NAN, -INF, INF]))
        if special is not None:
            x[row, torch.rand(V, generator=g) < (1.1 if special == -INF else 0.2)] = special
    greedy = torch.rand(R, generator=g) < draw(st.sampled_from([0.0, 0.5, 1.1]))
    keys = torch.tensor([draw(any_int64) for _ in range(R)]) if draw(st.booleans()) else torch.empty(0).long()
    places = torch.tensor([draw(positions_of_draws) for _ in range(R)])
    vocab_ids = torch.randperm(5 * V, generator=g)[:V] if draw(st.booleans()) else torch.empty(0).long()
    return [x, greedy, keys, places, vocab_ids]


@settings(max_examples=80, deadline=None)
@given(case=sample_cases())
def test_tokens_are_the_references(case: list[Tensor]) -> None:
    ours, expected = run("SpecSample", case)[0], sample._reference(*case)
    assert torch.equal(ours, expected)


def test_a_row_without_a_best_token_draws_none() -> None:
    x = torch.zeros(3, 8)
    x[0, 3], x[1] = NAN, -INF
    for keys in (torch.empty(0).long(), torch.tensor([1, 2, 3])):
        tokens = run("SpecSample", [x, torch.zeros(3).bool(), keys, torch.arange(3), torch.empty(0).long()])[0]
        assert tokens[:2].tolist() == [NO_TOKEN] * 2
        assert 0 <= tokens[2] < 8


@settings(max_examples=100, deadline=None)
@given(seed=seeds, B=st.integers(1, 5), K=st.integers(0, 4))
def test_accept(seed: int, B: int, K: int) -> None:
    g = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(0, 3, (B, K + 1), generator=g),
        torch.randint(0, 3, (B, K), generator=g),
        torch.randint(0, K + 1, (B,), generator=g).to(torch.int32),
        torch.randint(-1, K + 2, (B,), generator=g).to(torch.int32),
        torch.rand(B, generator=g) < 0.8,
    ]
    for ours, expected in zip(run("SpecAccept", tensors), accept._reference(*tensors), strict=True):
        assert torch.equal(ours, expected)
