"""``search`` and ``sensitivity``: the error of each module measured, and the plans with the best trade-offs."""
