"""Shapes, element types and small contents of a model's tensors, in terms of its open dimensions or in numbers."""
