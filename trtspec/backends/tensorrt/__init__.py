"""The TensorRT backend: build and run TensorRT plans."""
