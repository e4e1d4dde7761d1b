"""``torch.onnx.export`` with module tags: the capture of an export, and the owners of nodes."""
