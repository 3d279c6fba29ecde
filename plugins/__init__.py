"""Kernels behind the ops of trtspec.ops, by target. They know torch and the op contracts, nothing else of trtspec."""
