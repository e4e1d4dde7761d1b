"""Python's cyclic garbage collector, held back where it would run for nothing."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator

from htp_export.process.restoring import Changes, restored

__all__ = ["hold_collection", "no_collection", "rare_collections"]

_OBJECTS = 70_000  # made and not yet freed, before the youngest are looked through


def no_collection(*, kept: bool = False) -> contextlib.AbstractContextManager[None]:
    """Hold back the collector: what is made for a moment, or for good, would set off whole collections.

    One of them walks every object of the process, a quarter of a second with transformers loaded. A trace of an export
    makes no cycles that are worth it, and a profile is read in a third of the time.

    Args:
        kept: Whether what is made inside stays. Then it counts as old afterwards: it is not looked through soon, nor
            taken for growth that calls for a whole collection.
    """
    return restored(functools.partial(hold_collection, kept=kept))


def hold_collection(changes: Changes, *, kept: bool = False) -> None:
    """Hold back the collector until the changes are taken back.

    Args:
        changes: Where that is noted.
        kept: As in `no_collection`.
    """
    running, kept = gc.isenabled(), kept and not gc.get_freeze_count()

    def go_on() -> None:
        if running:
            if kept:
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()

    changes.will_undo(go_on)
    gc.disable()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector run about a hundred times less often, for a program that imports much and then ends.

    Importing torch and exporting a small model make about a million objects that stay. Walking over them takes 0.8 s of
    6 s of processor time with Python's own thresholds.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
