"""Modules that stay as they are: their precision is there to be named in plans."""

from __future__ import annotations

from htp_export.capabilities.quantize.method import Method


class Keep(Method):
    """Nothing is done."""

    activations = ("float32",)
    weights = ("float32",)


METHOD = Keep
