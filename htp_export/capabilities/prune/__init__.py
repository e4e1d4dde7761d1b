"""Pruning: zeros in weights, and channels, attention heads and residual blocks that are removed."""
