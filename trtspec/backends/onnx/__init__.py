"""The ONNX backend: ONNX graphs, and ONNX Runtime to run them."""
