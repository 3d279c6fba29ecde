"""The ONNX bodies of attention, and models with them, run by ONNX Runtime, against the torch references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.slow

onnx = pytest.importorskip("onnx", reason="pip install 'trtspec[onnx]'")
ort = pytest.importorskip("onnxruntime", reason="pip install 'trtspec[onnx]'")

from onnx import TensorProto, helper  # noqa: E402

from tests.unit.attention_cases import (  # noqa: E402
    LONGEST,
    Batch,
    Model,
    Part,
    TreePart,
    chain_batch,
    models,
    parts_of_up_to_40_rows,
    tree_batch,
    tree_parts,
)
from tests.unit.onnx_nodes import (  # noqa: E402
    ATTRIBUTES,
    INF,
    INPUTS,
    NAN,
    NO_FLOAT,
    NO_INT,
    _info,
    feeds_of,
    generation,
    model_of,
    random_logits,
    run,
    seeds,
    session_of,
)
from trtspec.backends.onnx import attention as onnx_attention  # noqa: E402
from trtspec.backends.onnx import functions  # noqa: E402
from trtspec.backends.onnx.functions import with_bodies  # noqa: E402
from trtspec.errors import UnsupportedError  # noqa: E402
from trtspec.ops import accept, attention, compact, logits, sample  # noqa: E402

# --- attention --------------------------------------------------------------------------------------------------------

ERROR = {torch.float32: 2e-6, torch.float16: 2**-10}  # for results of order 1: a few roundings in fp32, then one


@st.composite
def attention_cases(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, Any]]:
    """Inputs and attributes of SpecAttention: ragged batches with shuffled blocks, junk where nothing was written."""
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
    if poison is not None:  # in slots of no request, including the tails of last blocks
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
    """Run SpecAttention and compare it with the reference.

    The output is near the reference, with NaN in the same places. The caches are equal but for scratch, where writes
    may race.
    """
    out, *caches = run("SpecAttention", tensors, **attributes)
    expected, *expected_caches = attention._reference(*tensors, *attributes.values())
    torch.testing.assert_close(out, expected, rtol=ERROR[out.dtype], atol=2e-6, equal_nan=True)
    for ours, theirs in zip(caches, expected_caches, strict=True):
        assert torch.equal(ours[1:].view(torch.uint8), theirs[1:].view(torch.uint8))


@settings(max_examples=80, deadline=None)
@given(case=attention_cases())
def test_attention(case: tuple[list[Tensor], dict[str, Any]]) -> None:
    expect_attention(*case)


def test_attention_of_a_prompt_next_to_generating_requests() -> None:
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


def attention_of(batch: Batch) -> list[Tensor]:
    """Run SpecAttention on a batch with trees -> output and caches."""
    assert batch.tree_base is not None
    assert batch.ancestors is not None
    attributes = {"scale": batch.scale, "window": batch.window, "softcap": batch.softcap}
    return run("SpecAttention", [*batch.tensors, batch.tree_base, batch.ancestors], **attributes)


@settings(max_examples=60, deadline=None)
@given(model=models(), parts=st.lists(tree_parts() | parts_of_up_to_40_rows, min_size=1, max_size=4), seed=seeds)
def test_trees(model: Model, parts: list[Part | TreePart], seed: int) -> None:
    """Rows of trees, of chains and of prompts in one batch are near the reference, and written where it writes them."""
    assume(model.dtype in ERROR)
    assume(any(isinstance(part, TreePart) or part.num_rows for part in parts))
    batch = tree_batch(model.random_sequences(3, LONGEST, seed), parts)
    out, *caches = attention_of(batch)
    expected, *expected_caches = batch.run_functional()
    torch.testing.assert_close(out, expected, rtol=ERROR[out.dtype], atol=2e-6, equal_nan=True)
    for ours, theirs in zip(caches, expected_caches, strict=True):
        assert torch.equal(ours[1:].view(torch.uint8), theirs[1:].view(torch.uint8))


@pytest.mark.parametrize(("heads", "kv_heads", "depth"), [(4, 2, 64), (2, 2, 64), (2, 1, 128)])
def test_a_node_has_the_bits_of_the_chain_to_it(heads: int, kv_heads: int, depth: int) -> None:
    model = Model(heads=heads, kv_heads=kv_heads, head_dim=depth, block_size=16)
    sequences = model.random_sequences(2, LONGEST, 3)
    parents = (-1, -1, 0, 0, 1, 2, 5, -1)
    trees = [TreePart(0, 251, parents), TreePart(1, 30, parents[:4])]
    outs = attention_of(tree_batch(sequences, [*trees, Part(0, 100, 3), Part(1, 0, 40)]))[0]
    outs = outs.split([1 + len(tree.parents) for tree in trees] + [43])
    for tree, out in zip(trees, outs, strict=False):
        for node in range(-1, len(tree.parents)):
            chain = chain_batch(sequences, tree, node)
            attributes = {"scale": chain.scale, "window": chain.window, "softcap": chain.softcap}
            assert torch.equal(out[node + 1], run("SpecAttention", list(chain.tensors), **attributes)[0][0])


@pytest.mark.parametrize(("heads", "kv_heads", "depth"), [(4, 2, 64), (2, 2, 64), (2, 1, 128)])
def test_a_rows_bits_are_its_own(heads: int, kv_heads: int, depth: int) -> None:
    """A row has the same bits alone, verified together with others, or next to others (heads of up to 128)."""
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


def test_what_is_gathered_at_once_is_bounded_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(heads=4, kv_heads=2, head_dim=64, block_size=16)
    batch = tree_batch(model.random_sequences(2, LONGEST, 3), [TreePart(0, 251, (-1, -1, 0, 0, 1)), Part(1, 40, 3)])
    chains = generation([4, 4, 4, 1], [300, 40, 129, 64])
    wanted = [*attention_of(batch), *run("SpecAttention", chains, **ATTRIBUTES)]
    monkeypatch.setattr(onnx_attention, "MOST_IN_RUN", 1)
    functions.function.cache_clear()
    session_of.cache_clear()
    try:
        got = [*attention_of(batch), *run("SpecAttention", chains, **ATTRIBUTES)]
    finally:
        functions.function.cache_clear()
        session_of.cache_clear()
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_the_cache_may_be_its_own_output() -> None:
    """With the same memory bound as old and new cache, rows are written to their slots and nothing else changes."""
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
    """A graph whose every size is known when it is loaded returns the reference's results."""
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
    """Optional inputs that every step passes, and that a step leaves zero-size, act as if they were absent."""

    def run_all(op: str, arrays: dict[str, np.ndarray], **attributes: Any) -> list[np.ndarray]:
        present = tuple((name, arrays[name].dtype.str, arrays[name].ndim) for name in INPUTS[op])
        return session_of(op, present, tuple(attributes.items())).run(None, arrays)

    tensors = [*generation([4, 1], [60, 9])[:8], torch.zeros(0, 0).int(), NO_FLOAT, NO_INT, torch.zeros(0, 0).int()]
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
    """Two nodes that lack the same inputs, one in a function and one in a branch, get bodies."""
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
