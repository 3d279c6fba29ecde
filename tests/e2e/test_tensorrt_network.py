"""A step's TensorRT network, computed layer by layer as TensorRT documents, returns the outputs of the eager step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from tests.checkpoints import ARCHS, make_checkpoint
from tests.e2e.recorded import K, Recorder, cases_of
from tests.e2e.tensorrt_cases import written
from tests.fake_tensorrt.builder import FakeTensorRT
from tests.fake_tensorrt.network import FakeNetwork
from tests.fake_tensorrt.plugins import fake_plugin_of
from trtspec.backends.export import example_batch
from trtspec.backends.graph_io import INPUTS, graph_inputs, graph_outputs, input_names, output_names
from trtspec.backends.table import BACKENDS
from trtspec.backends.tensorrt.network import write_network
from trtspec.build.context import plan_context
from trtspec.build.steps import build_step
from trtspec.config.engine import EngineConfig
from trtspec.core import KVLayer
from trtspec.errors import UnsupportedError
from trtspec.methods.step import OneEngineStep


@pytest.mark.long
@pytest.mark.parametrize("uniform", [False, True], ids=["ragged", "uniform"])
def test_an_eagle3_step_is_what_its_network_computes(recorders: dict[str, Recorder], uniform: bool) -> None:
    """The network returns the outputs of every recorded batch.

    There are requests alone and together, contexts and chunks, greedy and sampled.
    """
    eager = recorders["sampled"].inner.step
    step = OneEngineStep(eager.decoder, eager.worker, functional=True)
    kv = recorders["sampled"].steps[0][1]
    network = written(step, kv[0][0].shape[1], K, uniform)
    sizes = set()
    for name in ("greedy", "sampled"):
        for inputs, before, outputs, after in cases_of(recorders[name], uniform):
            tensors = graph_inputs(inputs, input_names(step, uniform))
            rows = inputs.spec.gather_ids.shape[0]
            for field in tensors:
                if INPUTS[field].user and tensors[field].numel() == 0:
                    tensors[field] = INPUTS[field].unused(rows)
            got = network._run(tensors | caches_of(before))
            for output, want in graph_outputs(outputs, output_names(step)).items():
                assert torch.equal(got[output], want), output
            assert_close_kv(got, after)
            sizes.add((inputs.spec.num_contexts, inputs.spec.num_generations))
    assert (0, 1) in sizes
    assert len(sizes) >= (4 if uniform else 9)


@pytest.mark.long
def test_drafts_of_little_probability_are_cut_in_a_network(recorders: dict[str, Recorder]) -> None:
    eager = recorders["sampled"].inner.step
    worker = copy.copy(eager.worker)
    worker.confidence_threshold = 0.05
    step = OneEngineStep(eager.decoder, worker, functional=True)
    network = written(step, 4, K)
    inputs = replace(example_batch(K, 4), input_ids=torch.arange(5 + 2 * (K + 1)) % 7)
    blocks = int(inputs.attn.block_tables.max()) + 1
    before = [tuple(torch.zeros(blocks, 4, h, d) for _ in "kv") for h, d, _ in step.kv_layers]
    with torch.no_grad():
        wanted = graph_outputs(step(inputs, list(before)), output_names(step))
    got = network._run(graph_inputs(inputs, input_names(step)) | caches_of(before))
    assert torch.equal(got["next_draft_lens"], wanted["next_draft_lens"])
    assert 0 < int(wanted["next_draft_lens"].sum()) < 4 * K


@pytest.mark.long
def test_a_step_that_neither_verifies_nor_makes_drafts(recorders: dict[str, Recorder]) -> None:
    """A step with K = 0, for a schedule of draft lengths: the inputs and outputs of drafts have no elements."""
    eager = recorders["sampled"].inner.step
    step = OneEngineStep(eager.decoder, eager.worker, functional=True)
    network = written(step, 4, 0)
    inputs = example_batch(0, 4)
    blocks = int(inputs.attn.block_tables.max()) + 1
    before = [tuple(torch.zeros(blocks, 4, h, d) for _ in "kv") for h, d, _ in step.kv_layers]
    after = list(before)
    with torch.no_grad():
        outputs = graph_outputs(step(inputs, after), output_names(step))
    got = network._run(graph_inputs(inputs, input_names(step)) | caches_of(before))
    assert got["next_draft_tokens"].shape == (4, 0)
    for output, want in outputs.items():
        assert torch.equal(got[output], want), output
    assert_close_kv(got, after)


def caches_of(kv: Sequence[KVLayer]) -> dict[str, Tensor]:
    return {f"{part}_cache_{i}": layer[j] for i, layer in enumerate(kv) for j, part in enumerate("kv")}


def assert_close_kv(got: dict[str, Tensor], kv: Sequence[KVLayer], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for name, want in caches_of(kv).items():
        torch.testing.assert_close(got[f"new_{name}"], want, rtol=rtol, atol=atol)


QUICK = [("qwen3", "bfloat16")]
REST = [(arch, "float32") for arch in ARCHS if (arch, "float32") not in QUICK]
VARIANTS = [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in REST)]


@pytest.mark.parametrize(("arch", "dtype"), VARIANTS)
def test_a_plain_step_is_what_its_network_computes(tmp_path: Path, arch: str, dtype: str) -> None:
    """The network is right for every kind of model.

    There are rotary embeddings, biases, windows, norms of q and k, and a tied embedding.
    """
    tied = {"tie_word_embeddings": True} if arch == "qwen3" else {}
    config = EngineConfig(backend="onnx", dtype=dtype, max_batch_size=4, max_num_tokens=16, block_size=4)
    model = make_checkpoint(tmp_path, arch, num_hidden_layers=2, **tied)
    step = build_step(plan_context(model, None, config, BACKENDS["tensorrt"]))
    network = written(step, 4, 0)
    inputs = example_batch(0, 4)
    inputs = replace(inputs, input_ids=torch.arange(inputs.input_ids.shape[0]) % 9)
    g, element = torch.Generator().manual_seed(0), getattr(torch, dtype)
    blocks = int(inputs.attn.block_tables.max()) + 1
    before = [tuple(torch.randn(blocks, 4, h, d, generator=g).to(element) for _ in "kv") for h, d, _ in step.kv_layers]
    after = list(before)
    with torch.no_grad():
        tokens = step(inputs, after).tokens
    got = network._run(graph_inputs(inputs, input_names(step)) | caches_of(before))
    assert torch.equal(got["tokens"], tokens)
    assert_close_kv(got, after, *((1e-4, 1e-5) if dtype == "float32" else (0.05, 0.05)))


def test_an_operator_that_is_not_known_is_named() -> None:
    x = ir.Value(name="x", shape=ir.Shape([2, 3]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Softmax", [x], name="odd")
    model = ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}), ir_version=10)
    with pytest.raises(UnsupportedError, match=r"operator Softmax \(node 'odd'\), which is not written"):
        write_network(FakeTensorRT(), FakeNetwork(), model, fake_plugin_of)
