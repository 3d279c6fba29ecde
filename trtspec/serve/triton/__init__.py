"""Model repositories of Triton Inference Server."""
