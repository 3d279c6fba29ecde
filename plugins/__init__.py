"""Kernels that implement the ops of trtspec.ops, by target. They depend on torch and the op contracts alone."""
