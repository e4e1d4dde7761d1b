"""Weights that become zero, and channels, heads and residual blocks that are cut out."""
