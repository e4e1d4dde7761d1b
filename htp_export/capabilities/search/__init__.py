"""``search`` and ``sensitivity``: errors of single modules, and plans with the best trade-offs."""
