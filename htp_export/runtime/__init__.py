"""ONNX Runtime: sessions, arrays and inputs, comparison of values, and traces of the profiler."""
