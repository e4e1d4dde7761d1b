"""Names of execution providers on the command line."""

from __future__ import annotations

__all__ = ["provider_named"]


def provider_named(name: str) -> str:
    """The full name of a provider: ``cuda`` is short for ``CUDAExecutionProvider``."""
    import onnxruntime

    known: dict[str, str] = {provider.lower(): provider for provider in onnxruntime.get_all_providers()}
    return known.get(name.lower()) or known.get(f"{name.lower()}executionprovider", name)
