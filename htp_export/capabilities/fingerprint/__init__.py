"""Fingerprint: the family of architectures that a graph belongs to, and its repeated blocks."""
