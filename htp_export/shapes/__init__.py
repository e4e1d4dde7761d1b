"""Shapes, element types and small contents of tensors, in open dimensions or in numbers."""
