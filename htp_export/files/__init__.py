"""Read ONNX files without their weights, and write model and data files completely or not at all."""
