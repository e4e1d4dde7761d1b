"""Patterns of a graph that somebody may want to be otherwise, by module, and what changes them."""
