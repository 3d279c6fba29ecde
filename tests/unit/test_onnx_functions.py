"""The ONNX bodies of the ops, run by ONNX Runtime, against the torch references."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

onnx = pytest.importorskip("onnx", reason="pip install 'trtspec[onnx]'")
ort = pytest.importorskip("onnxruntime", reason="pip install 'trtspec[onnx]'")

from onnx import TensorProto, helper  # noqa: E402

from trtspec.backends.onnx.builder import Body  # noqa: E402
from trtspec.backends.onnx.functions import functions, with_bodies  # noqa: E402
from trtspec.backends.onnx.sampling import _dense_noise, _noise  # noqa: E402
from trtspec.errors import UnsupportedError  # noqa: E402
from trtspec.ops import accept, attention, compact, gumbel_noise, logits, sample  # noqa: E402

INF, NAN, NO_TOKEN = float("inf"), float("nan"), 2**63 - 1
OUTPUTS = {  # name, rank; of the first input's dtype
    "SpecAttention": (("out", 3), ("new_k_cache", 4), ("new_v_cache", 4)),
    "KvCompact": (("new_k_cache", 4), ("new_v_cache", 4)),
    "ProcessLogits": (("processed", 2),),
    "SpecSample": (("tokens", 1),),
    "SpecAccept": (("tokens", 2), ("num_tokens", 1)),
}
INPUTS = {body.name: tuple(body.input) for body in functions()}
seeds = st.integers(0, 2**31)


def model_of(op: str, present: tuple[tuple[str, str, int], ...], opset: int = 21, **attributes: Any) -> Any:
    """A model of one node. present: (name, numpy dtype, rank) of the inputs that it has, the others are left out."""
    known = {name: np.dtype(dtype) for name, dtype, _ in present}
    first = "<i8" if op == "SpecSample" else present[0][1]
    outputs = [(name, first, rank) for name, rank in OUTPUTS[op]]
    names = [name if name in known else "" for name in INPUTS[op]]
    while not names[-1]:
        names.pop()
    node = helper.make_node(op, names, [name for name, *_ in outputs], "the_op", domain="trtspec", **attributes)
    graph = helper.make_graph([node], "one_node", [_info(*one) for one in present], [_info(*one) for one in outputs])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("trtspec", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _info(name: str, dtype: str, rank: int) -> Any:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, kind, [f"{name}_{axis}" for axis in range(rank)])


@functools.cache
def session_of(op: str, present: tuple[tuple[str, str, int], ...], attributes: tuple[tuple[str, Any], ...]) -> Any:
    model = with_bodies(model_of(op, present, **dict(attributes)))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds_of(op: str, tensors: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Zero-size tensors are left out."""
    assert len(tensors) == len(INPUTS[op])
    optional = {"SpecAttention": 8, "ProcessLogits": 2, "SpecSample": 2}.get(op, 99)
    names = enumerate(zip(INPUTS[op], tensors, strict=True))
    return {n: t.contiguous().numpy() for i, (n, t) in names if t.numel() or i < optional or n == "positions"}


def run(op: str, tensors: Sequence[Tensor], **attributes: Any) -> list[Tensor]:
    feeds = feeds_of(op, tensors)
    present = tuple((name, array.dtype.str, array.ndim) for name, array in feeds.items())
    outputs = session_of(op, present, tuple(attributes.items())).run(None, feeds)
    return [torch.from_numpy(output) for output in outputs]


# --- attention --------------------------------------------------------------------------------------------------------

NO_INT = torch.empty(0, dtype=torch.int32)
NO_FLOAT = torch.empty(0)
ERROR = {torch.float32: 2e-6, torch.float16: 2**-10}  # of results of order 1: a few roundings in fp32, then one


@st.composite
def attention_cases(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, Any]]:
    """Inputs of SpecAttention and its attributes: ragged batches with shuffled blocks, junk where nobody wrote."""
    generator = torch.Generator().manual_seed(draw(seeds))
    uniform = draw(st.booleans())
    one = draw(st.integers(1, 6))
    q_lens = draw(st.lists(st.just(one) if uniform else st.integers(0, 40), min_size=1, max_size=4))
    assume(sum(q_lens))
    lengths = [n + draw(st.sampled_from([0, 1, 15, 100, 127, 128, 129, 270])) for n in q_lens]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    depth, block_size = draw(st.sampled_from([1, 6, 16, 64])), draw(st.sampled_from([1, 5, 16, 256]))
    dtype = draw(st.sampled_from(list(ERROR)))
    blocks = [-(-length // block_size) for length in lengths]
    order = iter((torch.randperm(sum(blocks), generator=generator) + 1).tolist())
    columns = max(blocks) + draw(st.integers(0, 2))
    tables = [[next(order) for _ in range(n)] + [0] * (columns - n) for n in blocks]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    T, heads = sum(q_lens), kv_heads * group
    caches = [random(sum(blocks) + 1, block_size, kv_heads, depth) for _ in range(2)]
    poison = draw(st.sampled_from([None, NAN, INF]))
    if poison is not None:  # in what belongs to nobody, the tails of last blocks included
        for cache in caches:
            cache[0] = poison
            for length, table in zip(lengths, tables, strict=True):
                if length % block_size:
                    cache[table[length // block_size], length % block_size :] = poison
    tree_mask = NO_INT
    if draw(st.booleans()):
        words = draw(st.integers(-(-max(q_lens) // 32), 3))
        tree_mask = torch.randint(-(2**31), 2**31, (T, words), generator=generator).to(torch.int32)
        for i, local in enumerate(i for n in q_lens for i in range(n)):  # a row sees itself
            tree_mask[i, local // 32] |= torch.tensor(1 << local % 32).to(torch.int32)
    attributes = {"scale": 0.25, "window": draw(st.sampled_from([0, 17])), "softcap": draw(st.sampled_from([0.0, 9.0]))}
    return [
        random(T, heads, depth), random(T, kv_heads, depth), random(T, kv_heads, depth), *caches,
        torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32), torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(tables, dtype=torch.int32), tree_mask,
        torch.randn(heads, generator=generator) if draw(st.booleans()) else NO_FLOAT,
    ], attributes  # fmt: skip


def expect_attention(tensors: list[Tensor], attributes: dict[str, Any]) -> None:
    """Near the reference, and NaN where it is; the caches equal it but for scratch, where writes may race."""
    out, *caches = run("SpecAttention", tensors, **attributes)
    expected, *expected_caches = attention._reference(*tensors, *attributes.values())
    torch.testing.assert_close(out, expected, rtol=ERROR[out.dtype], atol=2e-6, equal_nan=True)
    for ours, theirs in zip(caches, expected_caches, strict=True):
        assert torch.equal(ours[1:].view(torch.uint8), theirs[1:].view(torch.uint8))


@settings(max_examples=150, deadline=None)
@given(case=attention_cases())
def test_attention(case: tuple[list[Tensor], dict[str, Any]]) -> None:
    expect_attention(*case)


def generation(
    widths: Sequence[int], lengths: Sequence[int], heads: int = 4, kv_heads: int = 2, depth: int = 64, seed: int = 0
) -> list[Tensor]:
    """Inputs of SpecAttention, causal, blocks of 16. A token has the same q, k and v in whatever batch."""
    g = torch.Generator().manual_seed(seed)
    longest = 1024
    tokens = [torch.randn(len(widths), longest, n, depth, generator=g) for n in (heads, kv_heads, kv_heads)]
    columns = longest // 16
    tables = torch.arange(1, len(widths) * columns + 1).view(len(widths), columns)
    caches = []
    for x in tokens[1:]:
        cache = torch.zeros(1 + len(widths) * columns, 16, kv_heads, depth)
        for b, length in enumerate(lengths):  # what comes later is not there yet
            cache[tables[b]] = (x[b] * (torch.arange(longest) < length)[:, None, None]).view(columns, 16, kv_heads, -1)
        caches.append(cache)
    rows = [torch.cat([x[b, n - w : n] for b, (n, w) in enumerate(zip(lengths, widths, strict=True))]) for x in tokens]
    bounds = torch.tensor([0, *widths]).cumsum(0).to(torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32)
    return [*rows, *caches, bounds, ends, tables.to(torch.int32), NO_INT, NO_FLOAT]


ATTRIBUTES = {"scale": 0.125, "window": 0, "softcap": 0.0}


def test_attention_of_a_prompt_beside_generating_requests() -> None:
    expect_attention(generation([300, 4, 4, 4, 64, 64], [400, 9, 500, 129, 64, 200]), ATTRIBUTES)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_a_later_row_holds_does_not_reach_an_earlier_one(value: float) -> None:
    clean, broken = (generation([4, 4], [300, 40]) for _ in range(2))
    for name in (1, 2):
        broken[name][2] = value  # k and v of request 0's third row
    expect_attention(broken, ATTRIBUTES)
    ours, expected = (run("SpecAttention", one, **ATTRIBUTES)[0] for one in (broken, clean))
    assert torch.equal(ours[[0, 1, 4, 5, 6, 7]], expected[[0, 1, 4, 5, 6, 7]])
    assert ours[2:4].isnan().all()


def test_rows_past_the_table_are_written_to_scratch() -> None:
    tensors = generation([1, 4], [30, 66])
    tensors[7] = tensors[7][:, :4].contiguous()  # tables of 64 tokens
    out, *caches = run("SpecAttention", tensors, **ATTRIBUTES)
    expected, *expected_caches = attention._reference(*tensors, *ATTRIBUTES.values())
    for ours, theirs in zip(caches, expected_caches, strict=True):
        assert torch.equal(ours[1:], theirs[1:])
    torch.testing.assert_close(out[:3], expected[:3], rtol=2e-6, atol=2e-6)  # positions 29, 62 and 63


@pytest.mark.parametrize(("heads", "kv_heads", "depth"), [(4, 2, 64), (2, 2, 64), (2, 1, 128)])
def test_a_rows_bits_are_its_own(heads: int, kv_heads: int, depth: int) -> None:
    """Verifying rows together, or beside others, gives each the bits that it has alone (heads of up to 128)."""
    shape = {"heads": heads, "kv_heads": kv_heads, "depth": depth}
    alone = {}
    for b, end in ((0, 500), (1, 130)):
        for back in range(4):
            ends = [1, 1]
            ends[b] = end - back
            alone[b, end - back] = run("SpecAttention", generation([1, 1], ends, **shape), **ATTRIBUTES)[0][b]
    for widths, ends in (([4, 4], [500, 130]), ([2, 2], [500, 130]), ([4, 1], [500, 130]), ([100, 4], [500, 130])):
        out = run("SpecAttention", generation(widths, ends, **shape), **ATTRIBUTES)[0].split(widths)
        for b, (width, end) in enumerate(zip(widths, ends, strict=True)):
            for back in range(min(width, 4)):
                assert torch.equal(out[b][width - 1 - back], alone[b, end - back]), (widths, b, back)


def test_the_cache_may_be_its_own_output() -> None:
    """With the same memory bound as old and new cache, rows are written where they belong and nothing else changes."""
    tensors = generation([4, 4], [300, 40])
    feeds = feeds_of("SpecAttention", tensors)
    values = {name: ort.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in feeds.items()}
    out = ort.OrtValue.ortvalue_from_numpy(np.zeros_like(feeds["q"]))
    present = tuple((name, array.dtype.str, array.ndim) for name, array in feeds.items())
    session = session_of("SpecAttention", present, tuple(ATTRIBUTES.items()))
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in (("out", out), ("new_k_cache", values["k_cache"]), ("new_v_cache", values["v_cache"])):
        binding.bind_ortvalue_output(name, value)
    addresses = [values[name].data_ptr() for name in ("k_cache", "v_cache")]
    for _ in range(2):  # writing the same rows again changes nothing
        session.run_with_iobinding(binding)
        expected = attention._reference(*tensors, *ATTRIBUTES.values())
        got = out.numpy(), values["k_cache"].numpy(), values["v_cache"].numpy()
        np.testing.assert_allclose(got[0], expected[0], rtol=2e-6, atol=2e-6)
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(got[1:], expected[1:], strict=True))
    assert [one.data_ptr() for one in binding.get_outputs()[1:]] == addresses


@settings(max_examples=50, deadline=None)
@given(seed=seeds, requests=st.integers(1, 3), length=st.integers(0, 6), block_size=st.sampled_from([1, 3, 16]))
def test_compact(seed: int, requests: int, length: int, block_size: int) -> None:
    g = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 40, (requests,), generator=g).to(torch.int32)
    columns = -(-60 // block_size)
    tables = (torch.randperm(requests * columns, generator=g) + 1).view(requests, columns).to(torch.int32)
    path = torch.stack([torch.randperm(20, generator=g)[:length] for _ in range(requests)])
    kept = torch.randint(0, length + 1, (requests, 1), generator=g)
    path = torch.where(torch.arange(length) < kept, path, -1)
    caches = [torch.randn(requests * columns + 1, block_size, 2, 4, generator=g) for _ in range(2)]
    tensors = [*caches, tables, starts, path]
    for ours, theirs in zip(run("KvCompact", tensors), compact._reference(*tensors), strict=True):
        assert torch.equal(ours[1:], theirs[1:])


# --- logits and the draw ----------------------------------------------------------------------------------------------


def processed(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(ours, the reference's); groups that are not named are zero-size in the one and left out in the other."""
    one_each = ("prompt_lens", "temperatures", "top_ks", "top_ps", "min_ps")
    floats = ("penalties", "bias_values", "temperatures", "top_ps", "min_ps")
    everything = []
    for name in INPUTS["ProcessLogits"]:
        dtype = torch.float32 if name in floats else torch.int64 if name == "ban_until" else torch.int32
        everything.append(tensors.get(name, torch.empty(0 if name in one_each else (0, 0), dtype=dtype)))
    return run("ProcessLogits", everything)[0], logits._reference(*everything)


def random_logits(seed: int, rows: int, vocab: int, spread: float = 3.0, tied: bool = False) -> Tensor:
    x = spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return x.round() if tied else x


@st.composite
def logits_cases(draw: st.DrawFn) -> dict[str, Tensor]:
    """Any groups of process_logits together, some of whose rows do not use them."""
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
    """Rows that a rounding error moves across the edge of top-p or min-p, [R] bool: there both results are right."""
    close = torch.zeros(len(case["logits"]), dtype=torch.bool)
    for name, off in (("top_ps", 1.0), ("min_ps", 0.0)):
        if name in case:
            variants = []
            for nudge in (-1e-5, 1e-5):
                value = torch.where(case[name] == off, off, case[name] + nudge)
                variants.append(processed({**case, name: value})[1] == -INF)
            close |= (variants[0] != variants[1]).any(1)
    return close


@settings(max_examples=150, deadline=None)
@given(case=logits_cases())
def test_logits(case: dict[str, Tensor]) -> None:
    """The same bits wherever both keep a token, and the same tokens kept."""
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
    """NaN stays NaN and a row of -inf stays one, whatever is asked; their neighbour does not notice."""
    x = random_logits(3, 3, 50)
    x[0, 7], x[1] = NAN, -INF
    value = torch.full((3,), 4, dtype=torch.int32) if group == "top_ks" else torch.full((3,), 0.3)
    ours, expected = processed({"logits": x, "positions": torch.zeros(3).long(), group: value})
    assert ours[0, 7].isnan()
    assert (ours[1] == -INF).all()
    assert torch.equal(ours[2], expected[2])


@functools.cache
def noise_session(dense: bool) -> Any:
    """SpecSample's noise alone, from the nodes that its body is made of: of all ids, or of pairs (position, id)."""
    body = Body("Noise", ("seeds", "positions", "ids"))
    s, t, v = body.inputs
    noise = _dense_noise(s.at(1), t.at(1), body.Size(v).reshape(1)) if dense else _noise(s, t, v)
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
    """Over as many draws that each of the 24 exponents of u that are likely occurs."""
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


@settings(max_examples=200, deadline=None)
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


# --- models -----------------------------------------------------------------------------------------------------------

GREEDY = (("logits", "<f4", 2), ("greedy", "|b1", 1), ("positions", "<i8", 1))


def test_a_model_keeps_its_weights_outside_and_is_not_changed() -> None:
    model = model_of("SpecSample", GREEDY)
    weight = model.graph.initializer.add(name="weight", dims=[2**20], data_type=TensorProto.FLOAT)
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="weights.bin")
    before = model.SerializeToString()
    out = with_bodies(model)
    assert model.SerializeToString() == before
    assert out.graph.initializer[0] == weight
    assert [body.name for body in out.functions] == ["SpecSample_without_seeds_vocab_ids"]


def test_two_signatures_of_one_op_in_a_model() -> None:
    model = model_of("SpecSample", (*GREEDY[:2], ("seeds", "<i8", 1), GREEDY[2]))
    model.graph.node.append(
        helper.make_node("SpecSample", ["logits", "greedy", "", "positions"], ["likeliest"], domain="trtspec")
    )
    model.graph.output.append(_info("likeliest", "<i8", 1))
    session = ort.InferenceSession(with_bodies(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x, none, keys, places = random_logits(1, 9, 30), torch.zeros(9).bool(), torch.arange(9), torch.arange(9)
    feeds = {"logits": x, "greedy": none, "seeds": keys, "positions": places}
    drawn, likeliest = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    assert drawn.tolist() == sample._reference(x, none, keys, places, torch.empty(0).long()).tolist()
    assert likeliest.tolist() == x.argmax(1).tolist()
    assert (drawn != likeliest).any()


@pytest.mark.parametrize("op", sorted(INPUTS))
def test_fixed_shapes(op: str) -> None:
    """Of a graph whose every size is known when it is loaded."""
    g = torch.Generator().manual_seed(0)
    ids, places = torch.randint(0, 40, (3, 5), generator=g).to(torch.int32), torch.arange(3)
    x, some = random_logits(0, 3, 40), torch.rand(3, generator=g)
    attended = generation([2, 2], [40, 9])
    cases = {
        "SpecAttention": attended,
        "KvCompact": [*attended[3:5], attended[7], attended[6] - 2, torch.tensor([[1, 0], [1, -1]])],
        "ProcessLogits": [
            x, places, ids, ids[:, 0], torch.rand(3, 3, generator=g) + 0.5, ids, torch.rand(3, 5, generator=g), ids,
            ids.long(), torch.full((3, 2), -1, dtype=torch.int32), some + 0.5, ids[:, 2], some, some,
        ],
        "SpecSample": [x, torch.tensor([True, False, False]), places, places, torch.randperm(40)],
        "SpecAccept": [torch.ones(2, 3).long(), torch.ones(2, 2).long(), ids[:2, 0], -ids[:2, 0], some[:2] > 0],
    }  # fmt: skip
    references = {
        "SpecAttention": attention._reference,
        "KvCompact": compact._reference,
        "ProcessLogits": logits._reference,
        "SpecSample": sample._reference,
        "SpecAccept": accept._reference,
    }
    attributes = ATTRIBUTES if op == "SpecAttention" else {}
    expected = references[op](*cases[op], *attributes.values())
    feeds = feeds_of(op, cases[op])
    present = tuple((name, array.dtype.str, array.ndim) for name, array in feeds.items())
    model = model_of(op, present, **attributes)
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=True):
            dim.dim_value = size
    session = ort.InferenceSession(with_bodies(model).SerializeToString(), providers=["CPUExecutionProvider"])
    expected = expected if isinstance(expected, tuple) else (expected,)
    for ours, theirs in zip(session.run(None, feeds), expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6, atol=2e-6)


def test_inputs_that_are_there_but_empty() -> None:
    """Optional inputs that every step brings, and that a step leaves zero-size, are as if they were absent."""

    def run_all(op: str, arrays: dict[str, np.ndarray], **attributes: Any) -> list[np.ndarray]:
        present = tuple((name, arrays[name].dtype.str, arrays[name].ndim) for name in INPUTS[op])
        return session_of(op, present, tuple(attributes.items())).run(None, arrays)

    tensors = [*generation([4, 1], [60, 9])[:8], torch.zeros(0, 0).int(), NO_FLOAT]
    arrays = {name: tensor.numpy() for name, tensor in zip(INPUTS["SpecAttention"], tensors, strict=True)}
    ours, theirs = run_all("SpecAttention", arrays, **ATTRIBUTES), run("SpecAttention", tensors, **ATTRIBUTES)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))

    x, places = random_logits(0, 3, 50), torch.arange(3)
    floats = ("penalties", "bias_values", "temperatures", "top_ps", "min_ps")
    vectors = ("prompt_lens", "temperatures", "top_ks", "top_ps", "min_ps")
    arrays = {}
    for name in INPUTS["ProcessLogits"]:
        dtype = np.float32 if name in floats else np.int64 if name == "ban_until" else np.int32
        arrays[name] = np.zeros(0 if name in vectors else (0, 0), dtype)
    arrays |= {"logits": x.numpy(), "positions": places.numpy()}
    assert np.array_equal(run_all("ProcessLogits", arrays)[0], x)

    none = np.zeros(0, np.int64)
    arrays = {"logits": x.numpy(), "greedy": np.zeros(3, bool), "seeds": none, "positions": none, "vocab_ids": none}
    assert run_all("SpecSample", arrays)[0].tolist() == x.argmax(1).tolist()


@pytest.mark.parametrize("opset", [21, 22, 23, 24])
def test_newer_opsets(opset: int) -> None:
    model = with_bodies(model_of("SpecSample", GREEDY, opset))
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = random_logits(1, 2, 9)
    feeds = {"logits": x.numpy(), "greedy": np.ones(2, bool), "positions": np.zeros(2, np.int64)}
    assert session.run(None, feeds)[0].tolist() == x.argmax(1).tolist()


def test_nodes_in_branches_and_functions_get_bodies() -> None:
    """Two nodes that lack the same inputs, one in a function, one in a branch."""
    inner = helper.make_node("SpecSample", ["logits", "greedy", "", "positions"], ["drawn"], domain="trtspec")
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("trtspec", 1), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "Draw", ["logits", "greedy", "positions"], ["drawn"], [inner], opsets[:2])
    call = helper.make_node("Draw", ["logits", "greedy", "positions"], ["a"], domain="own")
    direct = helper.make_node("SpecSample", ["logits", "greedy", "", "positions"], ["b"], domain="trtspec")
    branches = {
        name: helper.make_graph([node], name, [], [_info(node.output[0], "<i8", 1)])
        for name, node in (("then_branch", call), ("else_branch", direct))
    }
    choice = helper.make_node("If", ["which"], ["tokens"], **branches)
    inputs = [_info(*one) for one in GREEDY] + [_info("which", "|b1", 0)]
    graph = helper.make_graph([choice], "two", inputs, [_info("tokens", "<i8", 1)])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[function])
    session = ort.InferenceSession(with_bodies(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = random_logits(1, 2, 9)
    for which in (True, False):
        feeds = {"logits": x.numpy(), "greedy": np.ones(2, bool), "positions": np.zeros(2, np.int64)}
        tokens = session.run(None, {**feeds, "which": np.array(which)})[0]
        assert tokens.tolist() == x.argmax(1).tolist()


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="opset is 18"):
        with_bodies(model_of("SpecSample", GREEDY, opset=18))
    with pytest.raises(UnsupportedError, match=r"'the_op' .* lacks its input greedy"):
        with_bodies(model_of("SpecSample", GREEDY[:1]))
    model = model_of("SpecSample", GREEDY)
    model.graph.node[0].op_type = "PackedLinear"
    with pytest.raises(UnsupportedError, match="PackedLinear"):
        with_bodies(model)
