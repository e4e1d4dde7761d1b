"""Module tags for files that others exported: evidence by weights, values and names, for the engine of `carry`."""
