"""The backend for NVIDIA GPUs through torch: Triton kernels, CUDA graphs, AOTInductor."""
