"""Modules cut out of a model, put back, and made into functions of it."""
