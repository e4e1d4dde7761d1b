"""What of htp_export runs in this thread or task: who tags its exports, and what captures the one that runs now."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from htp_export.capture.dynamo import DynamoCapture
    from htp_export.capture.torchscript import TorchScriptCapture


_log = logging.getLogger(__name__)
_one_at_a_time = threading.RLock()


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

    def torchscript(self, export: Callable[[], Any], model: Any, args: Any, names_inputs: bool) -> Any:
        """Run torch's TorchScript exporter and tag the file it writes."""


exporter: ContextVar[Exporter | None] = ContextVar("htp_export_exporter", default=None)
dynamo_capture: ContextVar[DynamoCapture | None] = ContextVar("htp_export_dynamo", default=None)
script_capture: ContextVar[TorchScriptCapture | None] = ContextVar("htp_export_torchscript", default=None)
translations_read: ContextVar[dict[tuple[tuple[str, Any], ...], Any] | None] = ContextVar(
    "htp_export_translations", default=None
)


def wanted() -> Exporter | None:
    """Who tags the exports of this thread or task; None where nobody asked for tags."""
    found = exporter.get()
    return None if found is None or found.ended else found


@contextlib.contextmanager
def value_in(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a variable, and put back what it was."""
    token: Token[Any] = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other thread exports with tags, and keep others waiting.

    Torch's tracers change classes and variables of the whole process while they run (``Module.__call__``,
    ``torch.jit._trace._trace_module_map``): of two that run at once, each would see modules that the other one runs.
    """
    if not _one_at_a_time.acquire(blocking=False):
        _log.info("waiting until the export in another thread is over")
        _one_at_a_time.acquire()
    try:
        yield
    finally:
        _one_at_a_time.release()
