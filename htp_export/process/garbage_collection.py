"""Suspend Python's cyclic garbage collector while it would find nothing."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator

from htp_export.process.restoring import Changes, restored

_OBJECTS = 70_000  # allocations minus deallocations that trigger a collection of the youngest generation


def no_collection(*, kept: bool = False) -> contextlib.AbstractContextManager[None]:
    """Suspend cyclic garbage collection: bulk allocation would trigger full collections.

    A full collection visits every object of the process and takes a quarter of a second with transformers loaded. A
    trace of an export creates few cycles, and a profile is read in a third of the time. If the objects that are created
    inside are ``kept`` alive, they are moved into the oldest generation.
    """
    return restored(functools.partial(hold_collection, kept=kept))


def hold_collection(changes: Changes, *, kept: bool = False) -> None:
    """Do the same until the changes are reverted."""
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
    """Run the garbage collector about a hundred times less often, for a program that imports much and then ends.

    Importing torch and exporting a small model creates about a million objects that stay alive. Visiting them with
    Python's own thresholds takes 0.8 s of 6 s of processor time.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
