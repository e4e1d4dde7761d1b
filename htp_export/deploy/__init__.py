"""Folders in which other runtimes expect a model."""
