"""Attention for torch is compiled to the same instructions in every configuration; no GPU is needed."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trtspec_plugins.triton import attention
from trtspec_plugins.triton.launch import attention_options, attention_shape, left_rows

PTX_VERSION = 87  # accepted by ptxas of every Triton wheel
ARCHITECTURES = (80, 90, 100, 120)
# Head size, pairs of row and query head that a request has, split, tree mask.
CONFIGURATIONS = [(128, 16, True, False), (128, 64, False, True), (64, 64, False, False)]
TENSORS = ("q", "k", "v", "k_cache", "v_cache", "out", "new_k_cache", "new_v_cache")
STRIDES = ("q_stride", "k_stride", "v_stride")


def compiled(architecture: int, head_dim: int, pairs: int, split: bool, tree: bool) -> Any:
    """Compile the kernel as the launcher of `attention` does, with bf16 tensors at multiples of 16 bytes."""
    shape = attention_shape(head_dim, 4, left_rows(pairs), 2)
    integers = ("T", "B", "columns", "num_blocks", "Hkv", *STRIDES, "scale_bits", "window")
    scratch = ("tops", "totals", "partials")
    types = {
        **dict.fromkeys(TENSORS, "*bf16"),
        **dict.fromkeys(("cu_q_lens", "kv_lens", "block_tables"), "*i32"),
        **dict.fromkeys(integers, "i32"),
        **({"tree_mask": "*i32", "words": "i32"} if tree else {}),
        **({**dict.fromkeys(scratch, "*fp32"), "chunks": "i32"} if split else {}),
    }
    names = attention.spec_attention_kernel.arg_names
    constants = {**dict.fromkeys(names), "block_size": 16, "CHUNK": attention.CHUNK, "ALIGN": 16, **shape}
    constants = {name: value for name, value in constants.items() if name not in types}
    aligned = [(names.index(name),) for name in types if types[name].startswith("*") or name in STRIDES]
    source = ASTSource(
        attention.spec_attention_kernel,
        types | dict.fromkeys(constants, "constexpr"),
        constants,
        {position: [["tt.divisibility", 16]] for position in aligned},
    )
    options = {**attention_options(shape, split, 2), "ptx_version": PTX_VERSION}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


@pytest.mark.parametrize(
    ("architecture", "configuration"),
    [
        *((architecture, CONFIGURATIONS[0]) for architecture in ARCHITECTURES),
        *((90, configuration) for configuration in CONFIGURATIONS[1:]),
        *(
            pytest.param(architecture, configuration, marks=pytest.mark.long)
            for architecture in ARCHITECTURES
            if architecture != 90
            for configuration in CONFIGURATIONS[1:]
        ),
    ],
    ids=str,
)
def test_products_are_the_same_instruction_everywhere(architecture: int, configuration: Any) -> None:
    """Products are the same instruction everywhere, also where a wider matrix would have wgmma or tcgen05.

    These may add in another order. Other roundings are written out, so that nothing is fused. Rows of the cache are
    copied 16 bytes at a time, ahead of their use.
    """
    ptx = compiled(architecture, *configuration).asm["ptx"]
    products = set(re.findall(r"^\s+(\S*mma\S*)", ptx, re.MULTILINE))
    assert products == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
    assert "tcgen05" not in ptx
    arithmetic = set(re.findall(r"^\s+((?:add|sub|mul|fma|mad|ex2)\.\S*f32)", ptx, re.MULTILINE))
    assert arithmetic == {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "ex2.approx.f32"}
    assert re.search(r"cp\.async\.cg\.shared\.global \[.*?\], \[.*?\], 0x10", ptx)
