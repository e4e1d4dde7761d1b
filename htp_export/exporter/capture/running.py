"""Per-thread state: the active exporter with tags, the running capture, and its errors.

Every step of a capture runs in `Guarded.step`. The first step that fails ends the capture; torch's
export continues, and `Guarded.give_up` decides at its end. Neither the model nor torch's exporter
runs inside a step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from htp_export.errors import CaptureError, HtpExportError, UntaggedExportWarning
from htp_export.process.forking import Mutex
from htp_export.process.restoring import Changes, locked

_log = logging.getLogger(__name__)
_PAUSE = 0.005  # seconds between attempts; short compared with an export

_Result = TypeVar("_Result")

# The exporter that adds tags: `htp_export.exporter.exporting._Exporter`, or None
exporter: ContextVar[Any] = ContextVar("htp_export_exporter", default=None)
# DynamoCapture | None
dynamo_capture: ContextVar[Any] = ContextVar("htp_export_dynamo", default=None)
# TorchScriptCapture | None
script_capture: ContextVar[Any] = ContextVar("htp_export_torchscript", default=None)
translations_read: ContextVar[dict[tuple[tuple[str, Any], ...], Any] | None] = ContextVar(
    "htp_export_translations", default=None
)
# whether torch's own repeated work is saved: `faster_dynamo`, `faster_torchscript`
hurries: ContextVar[bool] = ContextVar("htp_export_hurries", default=True)
keeps_dynamo: ContextVar[bool] = ContextVar("htp_export_keeps_dynamo", default=False)
wants_frames_of_layers: ContextVar[bool] = ContextVar("htp_export_frames_of_layers", default=False)


def wanted() -> Any:
    """The exporter that adds tags in this thread or task; None if tags are not wanted."""
    running = exporter.get()
    if running is None or running.ended:
        return None
    return running


def saves_work() -> bool:
    """Whether an export with tags runs in this thread or task whose repeated work is saved."""
    return hurries.get() and wanted() is not None


class _OneAtATime:
    """Lets one thread at a time export, or run a model for verify; its exports may be nested."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._thread = 0
        self._exports: set[object] = set()  # of the thread, nested

    def enter(self, export: object) -> None:
        """Begin an export as soon as no other thread is exporting."""
        begin = functools.partial(self._begin, export)
        if not locked(self._mutex.lock, begin):
            _log.info(
                "waiting until the export, or the model that verify runs, in another thread is over"
            )
            while not locked(self._mutex.lock, begin):
                time.sleep(_PAUSE)

    def _begin(self, export: object) -> bool:
        if self._exports and self._thread != threading.get_ident():
            return False
        self._thread = threading.get_ident()
        self._exports.add(export)
        return True

    def leave(self, export: object) -> None:
        """End an export, if it began."""
        self._exports.discard(export)


_ONE_AT_A_TIME = _OneAtATime()


def wait_alone(changes: Changes) -> None:
    """Wait until no other thread exports or runs a model for verify; others wait until undone.

    While they run, torch's tracers change classes and variables of the whole process
    (``Module.__call__``, ``torch.jit._trace._trace_module_map``): two at once would observe each
    other's modules.
    """
    export = object()
    changes.will_undo(functools.partial(_ONE_AT_A_TIME.leave, export))
    _ONE_AT_A_TIME.enter(export)


def alone(do: Callable[[Changes], _Result]) -> _Result:
    """Call a function while no other thread exports, as of `wait_alone`, and undo its changes."""
    changes = Changes()
    try:
        try:
            wait_alone(changes)
            return do(changes)
        finally:
            changes.take_back()
    finally:
        changes.take_back()


@contextlib.contextmanager
def seam(name: str) -> Iterator[None]:
    """Name a part of a step: an error inside becomes a `CaptureError` with this name.

    Its message is "the capture failed while", and the name.
    """
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(name, error) from error


def export_untagged(fault: HtpExportError) -> None:
    """Warn that an export continues without tags, and why."""
    warnings.warn(
        UntaggedExportWarning(f"the model is exported without module tags: {fault}"), stacklevel=2
    )


class Guarded:
    """A capture whose steps never raise."""

    def __init__(self) -> None:
        # whether an error ends the export; else the model is exported without tags
        self.strict = True
        self.fault: CaptureError | None = None  # the error of the first step that failed
        # changes outside the capture, undone at the end of the export
        self.changes = Changes()

    def step(
        self,
        name: str,
        do: Callable[..., _Result],
        *args: Any,
    ) -> _Result | None:
        """Run a step and return its result; None after an error, also of an earlier step.

        ``name`` is as of `seam`.
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
        """After an error, raise it if the capture is strict; else warn that there are no tags."""
        if self.fault is not None:
            if self.strict:
                raise self.fault
            export_untagged(self.fault)
