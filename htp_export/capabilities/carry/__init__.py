"""``carry``: module tags for what other tools made or exported, and adapters that run these tools."""

LEAST_KNOWN = 0.1
"""The share of nodes with known owners below which a file is refused: of unrelated models, about none are known.

A file of a builder that writes masks and repeated keys in its own way may have few known ones, and
these are right."""
