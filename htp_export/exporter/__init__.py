"""``torch.onnx.export`` with module tags: what is captured while PyTorch exports, and the owners of nodes."""
