"""Sorting that keeps the order of equal elements, as TopK of ONNX Runtime does; torch leaves their order open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["stable_sorting"]


@contextlib.contextmanager
def stable_sorting() -> Iterator[None]:
    """Let ``torch.sort`` and ``torch.argsort`` be stable where the caller leaves it open, as long as a block runs.

    A mixture of experts sorts tokens by expert. In which order those of one expert follow each other is open, and
    every module between the two sorts would differ.

    Examples:
        >>> import torch
        >>> with stable_sorting():
        ...     torch.sort(torch.zeros(1000))[1].tolist() == list(range(1000))
        True
    """
    import torch
    from torch.overrides import TorchFunctionMode

    sorting = {torch.sort, torch.Tensor.sort, torch.argsort, torch.Tensor.argsort}

    class Stable(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            named = any(isinstance(each, str) for each in args[1:]) or "dimname" in given
            if function in sorting and "stable" not in given and not named and len(args) <= 3:
                # With `stable`, the others are keywords alone.
                given |= dict(zip(("dim", "descending"), args[1:], strict=False))
                return function(args[0], stable=True, **given) if args else function(stable=True, **given)
            return function(*args, **given)

    with Stable():
        yield
