"""``place`` and ``placement``: which device runs each module."""
