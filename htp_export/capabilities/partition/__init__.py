"""``partition``: a model in stages, cut between modules."""
