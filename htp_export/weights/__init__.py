"""Which stored tensors nodes read, and which parameters of PyTorch they are."""
