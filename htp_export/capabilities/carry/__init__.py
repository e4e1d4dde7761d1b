"""``carry``: module tags for what other tools made or exported, and adapters that run these tools."""

LEAST_KNOWN = 0.1
"""Share of nodes with known owners below which a file is refused: unrelated models have about none.

A builder that writes masks and repeated keys in another way may produce a file with few known
owners; these are correct.
"""
