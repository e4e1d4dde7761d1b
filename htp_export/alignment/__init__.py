"""Alignment: the changes that another tool made of a graph, found by names, structure, weights and values."""
