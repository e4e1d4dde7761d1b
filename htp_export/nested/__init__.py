"""Models whose modules are ONNX functions, and the flat graph that they stand for."""
