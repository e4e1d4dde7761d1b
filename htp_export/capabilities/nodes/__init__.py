"""``nodes``: a map between nodes, modules and parameters."""
