"""Faults of a capture, kept out of the export that it watches.

Every step of a capture runs in `Guarded.step`. The first step that fails is noted and ends the capture; torch's export
goes on as if nobody watched it. What becomes of the fault is decided once the graph is complete: `Guarded.give_up`.
Nothing of the model and no step of torch's exporter runs inside a step, so that their errors are never taken for a
fault of the capture.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from htp_export.errors import CaptureError, HtpExportError, UntaggedExportWarning
from htp_export.process.restoring import Changes

__all__ = ["Guarded", "export_untagged", "seam"]

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@contextlib.contextmanager
def seam(name: str) -> Iterator[None]:
    """Name a part of a step: an error inside becomes a `CaptureError` that says the name.

    Args:
        name: What is done, as in "the capture failed while ...".
    """
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(name, error) from error


def export_untagged(fault: HtpExportError) -> None:
    """Warn that an export goes on without tags, and why."""
    warnings.warn(UntaggedExportWarning(f"the model is exported without module tags: {fault}"), stacklevel=2)


class Guarded:
    """A capture whose steps cannot fail.

    Attributes:
        strict: Whether a fault ends the export; else the model is exported without tags.
        fault: What the first step that failed said; None while all is well.
        changes: What the capture changed outside of itself; whoever runs the export takes it back.
    """

    def __init__(self) -> None:
        self.strict = True
        self.fault: CaptureError | None = None
        self.changes = Changes()

    def step(self, name: str, do: Callable[..., _Result], *args: Any) -> _Result | None:
        """Run a step, unless one before it failed.

        Args:
            name: As of `seam`.
            do: The step.
            args: Its arguments.

        Returns:
            What the step returns; None if it failed, or one before it.
        """
        if self.fault is not None:
            return None
        try:
            return do(*args)
        except CaptureError as fault:
            self.fault = fault
        except Exception as error:
            self.fault = CaptureError(name, error)
            self.fault.__cause__ = error
        _log.debug("the capture of modules ends here", exc_info=self.fault)
        return None

    def give_up(self) -> None:
        """Say that there will be no tags.

        Raises:
            CaptureError: The fault, if the capture is strict.
        """
        if self.fault is not None:
            if self.strict:
                raise self.fault
            export_untagged(self.fault)
