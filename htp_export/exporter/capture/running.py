"""What of htp_export runs in this thread or task: who tags its exports, what captures one, and faults of that.

Every step of a capture runs in `Guarded.step`. The first step that fails ends the capture; torch's
export goes on, and `Guarded.give_up` decides at its end. Nothing of the model or of torch's
exporter runs inside a step.
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
_PAUSE = 0.005  # seconds

_Result = TypeVar("_Result")

# What runs in place of torch's exporters: `htp_export.exporter.exporting._Exporter`, or None
exporter: ContextVar[Any] = ContextVar("htp_export_exporter", default=None)
# DynamoCapture | None
dynamo_capture: ContextVar[Any] = ContextVar("htp_export_dynamo", default=None)
# TorchScriptCapture | None
script_capture: ContextVar[Any] = ContextVar("htp_export_torchscript", default=None)
translations_read: ContextVar[dict[tuple[tuple[str, Any], ...], Any] | None] = ContextVar(
    "htp_export_translations", default=None
)
keeps_dynamo: ContextVar[bool] = ContextVar("htp_export_keeps_dynamo", default=False)
wants_frames_of_layers: ContextVar[bool] = ContextVar("htp_export_frames_of_layers", default=False)


def wanted() -> Any:
    """Who tags the exports of this thread or task; None where nobody asked for tags."""
    running = exporter.get()
    return None if running is None or running.ended else running


class _OneAtATime:
    """Lets one thread export, or run a model for verify, at a time; that thread may begin exports inside exports."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._thread = 0
        self._exports: set[object] = set()  # those of the thread, each inside the one before

    def enter(self, export: object) -> None:
        """Begin an export as soon as no other thread is at one."""
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
    """Wait until no other thread exports or runs a model for verify, and keep others waiting until changes are undone.

    Torch's tracers change classes and variables of the whole process while they run
    (``Module.__call__``, ``torch.jit._trace._trace_module_map``): of two that run at once, each
    would see modules that the other one runs.
    """
    export = object()
    changes.will_undo(functools.partial(_ONE_AT_A_TIME.leave, export))
    _ONE_AT_A_TIME.enter(export)


def alone(do: Callable[[Changes], _Result]) -> _Result:
    """Do something while no other thread exports, as of `wait_alone`, and take back what it changes."""
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
    """Name a part of a step: an error inside becomes a `CaptureError`, "the capture failed while" and the name."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(name, error) from error


def export_untagged(fault: HtpExportError) -> None:
    """Warn that an export goes on without tags, and why."""
    warnings.warn(
        UntaggedExportWarning(f"the model is exported without module tags: {fault}"), stacklevel=2
    )


class Guarded:
    """A capture whose steps cannot fail."""

    def __init__(self) -> None:
        # whether a fault ends the export; else the model is exported without tags
        self.strict = True
        # what the first step that failed said; None while all is well
        self.fault: CaptureError | None = None
        # what the capture changed outside of itself; whoever runs the export takes it back
        self.changes = Changes()

    def step(self, name: str, do: Callable[..., _Result], *args: Any) -> _Result | None:
        """Run a step, and return what it returns; None if it failed, or one before it. ``name`` is as of `seam`."""
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
        """Say that there will be no tags, if there was a fault; raises it if the capture is strict."""
        if self.fault is not None:
            if self.strict:
                raise self.fault
            export_untagged(self.fault)
