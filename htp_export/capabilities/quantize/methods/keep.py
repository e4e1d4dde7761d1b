"""The method of ``fp32``: modules stay as they are."""

from __future__ import annotations

from htp_export.capabilities.quantize.method import Method


class Keep(Method):
    """Leaves all nodes unchanged."""

    activations = ("float32",)
    weights = ("float32",)


METHOD = Keep
