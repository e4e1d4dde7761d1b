"""Matchers of patterns: each looks once at the nodes of an operator, and a few steps around them."""
