"""An NVIDIA GPU by way of torch: Triton kernels, CUDA graphs, AOTInductor."""
