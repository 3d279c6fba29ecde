"""Graphs' own loops on the library's threads: the bits of one thread, and errors that reach the caller."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trtspec.backends.aoti import graph_compiler
from trtspec.backends.aoti.graph_compiler import GraphCompiler
from trtspec.backends.aoti.loops import share_loops
from trtspec.ops import load_plugins
from trtspec.ops.dispatch import graph_calls

if "cpu" not in load_plugins():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

WIDTH = 96


class Layer(nn.Module):
    """A layer with the operations between a decoder's linears, a sum over rows, and rows of a table.

    Two softmaxes make a loop with buffers for a row. A sum of everything makes a loop with sums of its own.
    """

    def forward(self, x: Tensor, table: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        gate, up = normed.chunk(2, -1)
        twice = wide.softmax(-1).to(x.dtype).float().softmax(-1)
        return nn.functional.silu(gate) * up, wide.sum(0), table[ids], twice, wide.exp().sum()


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.bfloat16)
    return x, torch.randn(50, WIDTH, generator=generator), torch.randint(50, (rows,), generator=generator)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The same program twice: with loops in one thread, and with shared loops."""
    folder = tmp_path_factory.mktemp("loops")
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(Layer(), inputs(3), dynamic_shapes=({0: rows}, None, {0: rows}), strict=False)
    files, sources = [], []

    def share(kernels: str) -> str:
        sources.append(kernels)
        return share_loops(kernels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_compiler, "share_loops", share)
        for name, direct in (("one", {}), ("shared", graph_calls())):
            files.append(folder / f"{name}.pt2")
            with GraphCompiler(direct) as compiler:
                compiler.add(program, files[-1])
    assert "local_buffer_data_0 =" in sources[-1]
    assert "tmp_acc0_local =" in sources[-1]
    one, shared = (torch._inductor.aoti_load_package(str(file)) for file in files)
    return one, shared


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [2, 33, 700, 4001])
def test_bits_are_those_of_one_thread(graphs: tuple[Any, Any], rows: int) -> None:
    one, shared = graphs
    given = inputs(rows)
    for _ in range(5):  # threads that write over each other's values do not do so every time
        for expected, found in zip(one(*given), shared(*given), strict=True):
            assert torch.equal(expected, found)


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_shared_loop_reaches_the_caller(graphs: tuple[Any, Any]) -> None:
    x, table, ids = inputs(4000)
    ids[3999] = 50
    with pytest.raises(RuntimeError):
        graphs[1](x, table, ids)


KERNEL = """#include <prefix.h>
void kernel(float* sums, float* out, const int64_t ks0)
{
    #pragma omp parallel num_threads(2)
    {
        int tid = omp_get_thread_num();
        {
            #pragma omp for collapse(2)
            for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(ks0); x0+=static_cast<int64_t>(1L))
            {
                for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(64L); x1+=static_cast<int64_t>(16L))
                {
                    out[x0 + x1] = 1;
                }
            }
        }
        #pragma omp single
        {
            out[0] = 2;
        }
        {
            #pragma omp for
            for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(ks0); x0+=static_cast<int64_t>(1L))
            {
                sums[tid] += out[x0];
            }
        }
        {
            std::unique_ptr<float []> buf_local_buffer_data_0 = std::make_unique<float []>(64L);
            float* local_buffer_data_0 = buf_local_buffer_data_0.get();
            std::unique_ptr<at::BFloat16 []> buf_local_buffer_data_1 = std::make_unique<at::BFloat16 []>(64L);
            at::BFloat16* local_buffer_data_1 = buf_local_buffer_data_1.get();
            #pragma omp for
            for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(ks0); x0+=static_cast<int64_t>(1L))
            {
                local_buffer_data_0[0] = local_buffer_data_1[0] = 0;
            }
        }
    }
    #pragma omp parallel num_threads(2)
    {
        int tid = omp_get_thread_num();
        float tmp_acc0_local = 0;
        #pragma omp for
        for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(ks0); x0+=static_cast<int64_t>(1L))
        {
            tmp_acc0_local += out[x0];
        }
        sums[tid] = tmp_acc0_local;
    }
}
"""


def test_only_loops_that_do_not_ask_for_their_thread_are_shared() -> None:
    text = share_loops(KERNEL)
    assert "#pragma" not in text
    assert "omp_get_thread_num" not in text
    part = "[&](const int64_t trtspec_first, const int64_t trtspec_end) {"
    assert f"trtspec_loop(ks0, 1L, 64, {part} for" in text
    assert "for(int64_t x0=0L; x0<ks0; x0+=1L) {" in text.split("const int tid = 0;")[1]
    assert text.count(part) == 2
    assert text.count("{") == text.count("}")


def test_a_loop_over_nothing_has_chunks() -> None:
    assert "trtspec_loop(ks0, 1L, 1, " in share_loops(KERNEL.replace("64L); x1", "0L); x1"))


def test_threads_share_neither_buffers_nor_sums() -> None:
    text = share_loops(KERNEL)
    assert text.count("std::unique_ptr") == 2
    shared = text[text.rindex("trtspec_loop(ks0") : text.rindex("const int tid")]
    assert shared.count("std::unique_ptr") == shared.count(".get();") == 2
    assert shared.index("local_buffer_data_1 = ") < shared.index("for(")
    assert "for(int64_t x0=0L; x0<ks0; x0+=1L) {" in text[text.rindex("tmp_acc0_local = 0") :]
