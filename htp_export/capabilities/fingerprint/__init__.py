"""The family of architectures that a graph belongs to, and the blocks that it repeats."""
