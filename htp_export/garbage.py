"""Python's cyclic garbage collector, held back where it would run for nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["no_collection"]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Hold back the collector: what is kept for a moment would set off whole collections.

    One of them walks every object of the process, a quarter of a second with transformers loaded. A trace of an export
    makes no cycles that are worth it, and a profile is read in a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
