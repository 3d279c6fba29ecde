"""Networks of a step, written into the stand-in for TensorRT."""

from __future__ import annotations

from typing import cast

import torch

from tests.fake_tensorrt.builder import FakeTensorRT
from tests.fake_tensorrt.network import FakeNetwork
from tests.fake_tensorrt.plugins import fake_plugin_of
from trtspec.backends.export import example_batch
from trtspec.backends.onnx.export import export_onnx
from trtspec.backends.onnx.linear import write_linears
from trtspec.backends.tensorrt.network import write_network
from trtspec.core import KVLayer
from trtspec.methods.step import Step


def written(step: Step, block_size: int, draft_len: int, uniform: bool = False) -> FakeNetwork:
    """The network of a functional step. The dtypes and shapes of each layer are checked."""
    example = example_batch(draft_len, block_size, uniform)
    blocks, dtype = int(example.attn.block_tables.max()) + 1, step.like.dtype
    kv = [tuple(torch.zeros(blocks, block_size, h, d, dtype=dtype) for _ in "kv") for h, d, _ in step.kv_layers]
    model = export_onnx(step, example, cast("list[KVLayer]", kv), uniform)
    write_linears(model, "tensorrt")
    network = FakeNetwork()
    network._kept = write_network(FakeTensorRT(), network, model, fake_plugin_of)
    network._check()
    return network
