"""Patterns of a graph that can be simplified, by module, and the passes that do it."""
