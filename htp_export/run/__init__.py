"""Whatever runs PyTorch or ONNX Runtime on an exported model."""
