"""Lineage: which nodes replace which after a change, the rule that makes owners of it, and the fates that follow."""
