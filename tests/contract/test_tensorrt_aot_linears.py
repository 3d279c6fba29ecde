"""The AOT form of the plugins for linears: their kernel's instructions, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

trt = pytest.importorskip("tensorrt", reason="TensorRT is not installed here: make contract-tensorrt")
pytest.importorskip("triton", reason="Triton is not installed here: make contract-tensorrt")

from tests.contract import test_tensorrt_aot as aot  # noqa: E402
from tests.contract.fake_builder import create  # noqa: E402
from tests.contract.test_tensorrt_aot import (  # noqa: E402
    ARCHITECTURES,
    BF16,
    F32,
    I32,
    LAUNCHES,
    LINEAR,
    launched,
    ptx,
)

built = aot.built


def test_logits_refuse_what_no_kernel_can_be_chosen_for() -> None:
    plugin = create("LinearLogits", {}, trt.QuickPluginCreationRequest.STRICT_AOT)
    with pytest.raises(ValueError, match="a fixed number of inputs in x that is a multiple of 64"):
        launched(plugin, [(BF16, ["N", 96]), (BF16, [999, 96])])
    with pytest.raises(TypeError, match=r"x and weight of one dtype, HALF or BF16: DataType\.FLOAT"):
        launched(plugin, [(F32, ["N", 64]), (F32, [999, 64])])
    with pytest.raises(LookupError, match="LinearLogits-fp16 is not compiled for sm_90: run"):
        launched(plugin, [(torch.float16, ["N", 64]), (torch.float16, [999, 64])])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_multiplied_as_on_the_backend_cuda(built: dict[str, Any], architecture: str) -> None:
    """The kernel has one instruction that multiplies, and copies 16 bytes of a matrix at a time."""
    code = ptx(built, f"{LINEAR}-{architecture}")
    products = set(re.findall(r"\b(?:mma\.sync|wgmma|tcgen05)[\w.]*", code))
    assert products == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x\w+|\d+)", code)
    assert copies
    assert {int(size, 0) for size in copies} == {16}


def test_products_in_groups_refuse_what_no_kernel_can_be_chosen_for() -> None:
    plugin = create("GroupsLinear", {"bits": 4}, trt.QuickPluginCreationRequest.STRICT_AOT)
    (_, depth), *middle, (_, width) = LAUNCHES["GroupsLinear"][0]
    with pytest.raises(ValueError, match="GroupsLinear wants fixed numbers of inputs in x, of outputs in bias"):
        launched(plugin, [(BF16, ["N", "M"]), *middle, (BF16, width)])
    with pytest.raises(TypeError, match=r"GroupsLinear wants x of FLOAT, HALF or BF16: DataType\.INT32"):
        launched(plugin, [(I32, depth), *middle, (I32, width)])
    with pytest.raises(LookupError, match="GroupsLinear-fp32-w4-g128 is not compiled for sm_90: run"):
        launched(plugin, [(F32, depth), *middle, (F32, width)])
    plugin = create("QuantizeGroups", {"group": 128}, trt.QuickPluginCreationRequest.STRICT_AOT)
    with pytest.raises(ValueError, match="QuantizeGroups wants a fixed number of inputs in x"):
        launched(plugin, [(BF16, ["N", "M"])])
