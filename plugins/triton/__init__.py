"""Kernels in the Triton language, for NVIDIA GPUs. Each file has one op: the kernel, and a function that launches it.

The order of a kernel's arguments is the one that TensorRT gives: inputs, integers, outputs, so that the same kernel,
compiled ahead of time, serves there (plugins/tensorrt/aot.py). Compaction, sampling and acceptance give the
references' results bit for bit: compile with enable_fp_fusion off, as a fused multiply-add rounds once where the
references round twice. Attention adds in an order of its own, and so do the filters of logits, whose results are the
references' but for tokens within rounding errors of an edge.

What is shown without a GPU: the kernels' results, in Triton's interpreter (TRITON_INTERPRET=1), and that they compile.
That the compiled kernels give the same results on a GPU is not, and none has been timed or tuned: attention loads
element by element, as nothing promises it aligned pointers.
"""
