"""Graphs of PyTorch models for inspection, also of models that do not export to ONNX."""
