"""What of htp_export runs in this thread or task: who tags its exports, and what captures the one that runs now."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from htp_export.process.restoring import Changes, locked

if TYPE_CHECKING:
    from htp_export.exporter.capture.dynamo import DynamoCapture
    from htp_export.exporter.capture.program_bodies import ProgramBodies
    from htp_export.exporter.capture.torchscript import TorchScriptCapture


_log = logging.getLogger(__name__)
_PAUSE = 0.005  # seconds


class Exporter(Protocol):
    """What the patches call when an export runs in a thread that asked for tags."""

    @property
    def strict(self) -> bool:
        """Whether an export fails that cannot be tagged."""

    @property
    def ended(self) -> bool:
        """Whether the block that asked for tags is over."""

    def dynamo(self, export: Callable[[], Any], model: Any) -> Any:
        """Run torch's dynamo exporter and tag its result."""

    def replaced(self, old: Any, new: Any) -> None:
        """Note that a value of an ONNX graph was replaced after its export."""

    def settle(self) -> None:
        """Tag the models that were rewritten after their export."""

    def program(self, export: Callable[[], Any], model: Any) -> Any:
        """Run ``torch.export`` and keep what is captured with the program that it makes."""

    def torchscript(self, export: Callable[[], Any], model: Any, args: Any, names_inputs: bool) -> Any:
        """Run torch's TorchScript exporter and tag the file it writes."""


exporter: ContextVar[Exporter | None] = ContextVar("htp_export_exporter", default=None)
dynamo_capture: ContextVar[DynamoCapture | None] = ContextVar("htp_export_dynamo", default=None)
program_bodies: ContextVar[ProgramBodies | None] = ContextVar("htp_export_program_bodies", default=None)
script_capture: ContextVar[TorchScriptCapture | None] = ContextVar("htp_export_torchscript", default=None)
translations_read: ContextVar[dict[tuple[tuple[str, Any], ...], Any] | None] = ContextVar(
    "htp_export_translations", default=None
)


keeps_dynamo: ContextVar[bool] = ContextVar("htp_export_keeps_dynamo", default=False)
wants_frames_of_layers: ContextVar[bool] = ContextVar("htp_export_frames_of_layers", default=False)


def wanted() -> Exporter | None:
    """Who tags the exports of this thread or task; None where nobody asked for tags."""
    running = exporter.get()
    return None if running is None or running.ended else running


class _OneAtATime:
    """Lets one thread export, or run a model for verify, at a time; that thread may begin exports inside exports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0
        self._exports: set[object] = set()  # those of the thread, each inside the one before

    def enter(self, export: object) -> None:
        """Begin an export as soon as no other thread is at one."""
        begin = functools.partial(self._begin, export)
        if not locked(self._lock, begin):
            _log.info("waiting until the export, or the model that verify runs, in another thread is over")
            while not locked(self._lock, begin):
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

    Torch's tracers change classes and variables of the whole process while they run (``Module.__call__``,
    ``torch.jit._trace._trace_module_map``): of two that run at once, each would see modules that the other one runs.
    """
    export = object()
    changes.will_undo(functools.partial(_ONE_AT_A_TIME.leave, export))
    _ONE_AT_A_TIME.enter(export)
