"""Compile packed_linear's kernels without a GPU, and print the instructions that multiply matrices, as JSON.

Arguments: architectures, such as 90.

It is its own process, because Triton decides when it is imported whether kernels are interpreted or compiled.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trtspec_plugins.triton import linear

POINTERS = {"bf16": ("*bf16", "*bf16"), "fp32": ("*fp32", "*fp32"), "fp8": ("*bf16", "*u8")}
INTEGERS = ("T", "N", "K", "x_stride", "piece_steps")


def instructions(
    layout: str, architecture: int, kernel: object, rows: int, columns: int, options: dict, split: bool = True
) -> dict:
    x, weight = POINTERS[layout]
    scratch = {"partials": "*fp32", "counters": "*i32"} if kernel is linear.few_rows_kernel else {}
    pointers = {"x": x, "weight": weight, "scales": "*fp32", "x_scales": "*fp32", "bias": x}
    signature = {**pointers, **dict.fromkeys(INTEGERS, "i32"), **scratch, "out": "*fp32"}
    constants = {
        "LAYOUT": linear.FP8.value if layout == "fp8" else linear.PLAIN.value,
        "X_SCALE": False,
        "BIAS": True,
        "SPLIT": split,
        "EVEN": True,
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "BLOCK_K": linear.BLOCK_BYTES * 8 // int(re.sub(r"\D", "", weight)),
    }
    aligned = [name for name in signature if name not in ("T", "piece_steps")]
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in aligned}
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    made = compile(
        ASTSource(kernel, types, constants, attributes),
        target=GPUTarget("cuda", architecture, 32),
        options={"enable_fp_fusion": False, "ptx_version": 87, **options},
    )
    found = re.findall(r"\b((?:mma\.sync|wgmma|tcgen05|mma\.sp)[\w.]*)", made.asm["ptx"])
    return {
        "instructions": sorted(set(found)),
        "kWidth": sorted(set(re.findall(r"kWidth = \d+", made.asm["ttgir"]))),
    }


def main(architectures: list[int]) -> None:
    compiled = {}
    for layout in POINTERS:
        number = linear.FP8.value if layout == "fp8" else linear.PLAIN.value
        dtype = torch.float32 if layout == "fp32" else torch.bfloat16
        for architecture in architectures:
            for rows in (16,) if layout == "fp32" else (16, 32):
                compiled[f"{layout} sm_{architecture} few {rows}"] = instructions(
                    layout, architecture, linear.few_rows_kernel, rows, linear.COLUMNS, linear.FEW
                )
            for columns in (64,) if layout == "fp32" else (64, 128):
                for split in (False, True):
                    options = linear.many_options(dtype, number, columns, split)
                    compiled[f"{layout} sm_{architecture} many {columns} {split}"] = instructions(
                        layout, architecture, linear.many_rows_kernel, 16 if layout == "fp32" else 32, columns, options,
                        split,
                    )  # fmt: skip
    print(json.dumps(compiled))


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]])
