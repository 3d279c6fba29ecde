"""ONNX graphs, and ONNX Runtime to run them."""
