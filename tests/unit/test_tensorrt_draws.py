"""ProcessLogits and SpecSample of TensorRT's own layers: their bodies in ONNX Runtime, and as layers of the stand-in.

The oracles are the ops' torch references.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from torch import Tensor

from tests.fake_tensorrt.builder import FakeTensorRT
from tests.fake_tensorrt.network import FakeNetwork
from tests.unit.onnx_nodes import INF, NAN, NO_TOKEN, random_logits, seeds
from trtspec.backends.onnx.export import DOMAIN
from trtspec.backends.tensorrt.bits import BITS
from trtspec.backends.tensorrt.draws import process_logits, spec_sample
from trtspec.backends.tensorrt.inline import inline_functions
from trtspec.backends.tensorrt.ops import write_node
from trtspec.backends.tensorrt.writer import Writer
from trtspec.ops import logits, sample

pytestmark = pytest.mark.slow

FUNCTIONS = {"ProcessLogits": process_logits, "SpecSample": spec_sample}
DTYPES = {torch.float32: 1, torch.int32: 6, torch.int64: 7, torch.bool: 9}
FILTERS = ("temperatures", "top_ks", "top_ps", "min_ps")


@functools.cache
def model_of(op: str, names: tuple[str, ...], types: tuple[int, ...], ranks: tuple[int, ...], inlined: bool) -> Any:
    """A model with one node of an op that has these inputs. inlined: it is an onnx_ir model without functions."""
    sizes = {1: ["R"], 2: ["R", None]}
    inputs = [helper.make_tensor_value_info(n, t, sizes[r]) for n, t, r in zip(names, types, ranks, strict=True)]
    if "vocab_ids" in names:
        inputs[names.index("vocab_ids")] = helper.make_tensor_value_info("vocab_ids", 7, ["V"])
    out = helper.make_tensor_value_info("out", 1 if op == "ProcessLogits" else 7, None)
    body = FUNCTIONS[op]({name for name in FUNCTIONS[op](()).input if name not in names})
    node = helper.make_node(body.name, list(body.input), ["out"], domain=DOMAIN)
    graph = helper.make_graph([node], "one", inputs, [out])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    whole = helper.make_model(graph, functions=[body], opset_imports=opsets, ir_version=10)
    if not inlined:
        import onnxruntime as ort

        return ort.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    model = ir.serde.deserialize_model(whole)
    inline_functions(model)
    return model


def run(op: str, tensors: dict[str, Tensor], on_layers: bool = False) -> Tensor:
    """Result of an op with these inputs, in ONNX Runtime or on the stand-in's layers."""
    names = tuple(tensors)
    types, ranks = tuple(DTYPES[one.dtype] for one in tensors.values()), tuple(one.ndim for one in tensors.values())
    model = model_of(op, names, types, ranks, on_layers)
    if not on_layers:
        return torch.from_numpy(model.run(None, {name: one.numpy() for name, one in tensors.items()})[0])
    trt, network = FakeTensorRT(), FakeNetwork()
    w = Writer(trt, network)
    for value in model.graph.inputs:
        w.set(value, network.add_input(value.name, w.dtype(value.dtype), (-1,) * len(value.shape)))
    model.graph.sort()
    for node in model.graph:
        write_node(w, node)
    out = w.get(model.graph.outputs[0])
    out.name = "out"
    network.mark_output(out)
    network._check()
    return network._run(tensors)["out"]


def wanted_logits(tensors: dict[str, Tensor]) -> Tensor:
    """The reference's logits."""
    none, ids = torch.empty(0), torch.empty(0, 0, dtype=torch.int32)
    bans = [tensors.get("ban_ids", ids), tensors.get("ban_until", ids.long())]
    filters = [tensors.get(name, none.int() if name == "top_ks" else none) for name in FILTERS]
    edits = [ids, none.int(), torch.empty(0, 0), ids, torch.empty(0, 0)]
    return logits._reference(tensors["logits"], tensors["positions"], *edits, *bans, ids, *filters)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Tensor]:
    """Rows with filters and bans in any combination. Some rows ask for none."""
    g = torch.Generator().manual_seed(draw(seeds))
    R, V = draw(st.integers(1, 5)), draw(st.sampled_from([33, 64, 257, 5000]))

    def some(values: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(R, generator=g) < 0.3, torch.full_like(values, off), values)

    x = random_logits(draw(seeds), R, V, draw(st.sampled_from([0.5, 3.0, 30.0])), draw(st.booleans()))
    return {
        "logits": x,
        "positions": torch.randint(0, 9, (R,), generator=g),
        "ban_ids": torch.randint(-1, V, (R, 4), generator=g).to(torch.int32),
        "ban_until": torch.randint(0, 9, (R, 4), generator=g),
        "temperatures": some(torch.rand(R, generator=g) + 0.3, 0.0),
        "top_ks": some(torch.randint(-1, V + 3, (R,), generator=g).to(torch.int32), 0),
        "top_ps": some(torch.rand(R, generator=g), 1.0),
        "min_ps": some(torch.rand(R, generator=g), 0.0),
    }


def near_a_threshold(case: dict[str, Tensor]) -> Tensor:
    """[R] bool: rows that a rounding error moves across the edge of top-p or min-p. There both results are right."""
    close = torch.zeros(len(case["logits"]), dtype=torch.bool)
    for name, off in (("top_ps", 1.0), ("min_ps", 0.0)):
        nudged = [torch.where(case[name] == off, off, case[name] + by) for by in (-1e-5, 1e-5)]
        low, high = (wanted_logits({**case, name: value}) == -INF for value in nudged)
        close |= (low != high).any(1)
    return close


@settings(max_examples=60, deadline=None)
@given(case=cases(), on_layers=st.booleans())
def test_the_same_tokens_are_kept(case: dict[str, Tensor], on_layers: bool) -> None:
    ours, wanted = run("ProcessLogits", case, on_layers), wanted_logits(case)
    assert not ((ours != wanted).any(1) & ~near_a_threshold(case)).any()
    kept = (ours > -INF) & (wanted > -INF)
    assert torch.equal(ours[kept], wanted[kept])


def test_ties_with_the_last_token_stay_and_rows_without_an_answer_keep_having_none() -> None:
    x = torch.tensor([[3.0, 1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 1.0, 1.0, -INF], [0.0, NAN, 1.0, 2.0, 3.0], [-INF] * 5])
    positions, zeros = torch.zeros(4).long(), torch.zeros(4)
    off = {"temperatures": zeros, "top_ks": zeros.int(), "top_ps": zeros + 1, "min_ps": zeros}
    asked = {"logits": x, "positions": positions, **off}
    ours = run("ProcessLogits", {**asked, "top_ks": torch.tensor([1, 3, 1, 1], dtype=torch.int32)})
    assert (ours > -INF).tolist()[:2] == [[True, False, True, True, False], [True, True, True, True, False]]
    assert ours[2].isnan().any()
    assert (ours[3] == -INF).all()
    ours = run("ProcessLogits", {**asked, "top_ps": zeros})
    assert (ours > -INF).tolist()[:2] == [[True, False, True, True, False], [True, True, False, False, False]]
    assert torch.equal(run("ProcessLogits", asked)[[0, 1, 3]], x[[0, 1, 3]])


@pytest.mark.parametrize("on_layers", [False, True], ids=["onnxruntime", "layers"])
@pytest.mark.parametrize("vocab", [False, True], ids=["all ids", "some ids"])
def test_the_same_tokens_are_drawn(vocab: bool, on_layers: bool) -> None:
    """240 rows, half of them sampled, with seeds and positions of up to 63 bits."""
    g = torch.Generator().manual_seed(7)
    R, V = 240, 97
    tensors = {
        "logits": torch.randn(R, V, generator=g).round(decimals=1),  # with ties
        "greedy": torch.arange(R) % 2 == 0,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (R,), generator=g),
        "positions": torch.randint(0, 2**40, (R,), generator=g),
    }
    ids = torch.randperm(5000, generator=g)[:V] if vocab else torch.empty(0, dtype=torch.long)
    wanted = sample._reference(*tensors.values(), ids)
    ours = run("SpecSample", {**tensors, **({"vocab_ids": ids} if vocab else {})}, on_layers)
    assert torch.equal(ours, wanted)
    assert len(set(ours.tolist())) > 40


def test_a_row_without_a_best_token_gets_an_id_that_the_host_refuses() -> None:
    x = torch.zeros(2, 8)
    x[0, 3], x[1] = NAN, -INF
    tensors = {"logits": x, "greedy": torch.tensor([True, True]), "positions": torch.zeros(2).long()}
    assert run("SpecSample", tensors).tolist() == [NO_TOKEN, NO_TOKEN]


WORDS = [0, 1, 255, 256, 2**31 - 1, 2**31, 0xDEADBEEF, 2**32 - 1]
LONG = [*WORDS, -1, -(2**63), 2**63 - 1, -(2**31)]


@pytest.mark.parametrize(
    ("op", "x", "operand", "wanted"),
    [
        *(("BitwiseXor", WORDS, b, [a ^ b for a in WORDS]) for b in (0, 0xFF00FF00, 0x12345678)),
        *(("BitwiseAnd", LONG, b, [a & b for a in LONG]) for b in (1, 3, 0xFFFFFFFF)),
        *(("BitShift", LONG, b, [(a % 2**64) >> b for a in LONG]) for b in (2, 9, 32)),
    ],
)
def test_bits_of_integers(op: str, x: Sequence[int], operand: int, wanted: list[int]) -> None:
    network = FakeNetwork()
    w = Writer(FakeTensorRT(), network)
    value = ir.Value(name="x", shape=ir.Shape([len(x)]), type=ir.TensorType(ir.DataType.INT64))
    w.set(value, network.add_input("x", w.dtype(ir.DataType.INT64), (-1,)))
    held = ir.serde.deserialize_tensor(numpy_helper.from_array(np.array(operand, np.int64)))
    other = ir.Value(name="other", const_value=held)
    node = ir.node(op, [value, other], {"direction": "RIGHT"} if op == "BitShift" else {}, name="one")
    [out] = BITS[op](w, node)
    out.name = "out"
    network.mark_output(out)
    assert network._run({"x": torch.tensor(x)})["out"].tolist() == wanted
