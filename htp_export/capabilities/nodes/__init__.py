"""``nodes``: which node computes which module and reads which parameter."""
