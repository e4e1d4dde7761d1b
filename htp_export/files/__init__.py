"""Read ONNX files without their weights, and write them with their data files completely or not at all."""
