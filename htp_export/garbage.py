"""Python's cyclic garbage collector, held back where it would run for nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["no_collection"]


@contextlib.contextmanager
def no_collection(*, kept: bool = False) -> Iterator[None]:
    """Hold back the collector: what is made for a moment, or for good, would set off whole collections.

    One of them walks every object of the process, a quarter of a second with transformers loaded. A trace of an export
    makes no cycles that are worth it, and a profile is read in a third of the time.

    Args:
        kept: Whether what is made inside stays. Then it counts as old afterwards: it is not looked through soon, nor
            taken for growth that calls for a whole collection.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if kept and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
