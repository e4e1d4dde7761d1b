"""``view``: a model as a page, as a graph for Model Explorer, and as a sidecar for Netron."""
