"""What of htp_export runs in this thread or task: who tags its exports, and what captures the one that runs now."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from htp_export.capture.dynamo import DynamoCapture
    from htp_export.capture.torchscript import TorchScriptCapture


class Exporter(Protocol):
    """What the patches call when an export runs in a thread that asked for tags."""

    def dynamo(self, export: Callable[[], Any], model: Any) -> Any:
        """Run torch's dynamo exporter and tag its result."""

    def torchscript(self, export: Callable[[], Any], model: Any, names_inputs: bool) -> Any:
        """Run torch's TorchScript exporter and tag the file it writes."""


exporter: ContextVar[Exporter | None] = ContextVar("htp_export_exporter", default=None)
dynamo_capture: ContextVar[DynamoCapture | None] = ContextVar("htp_export_dynamo", default=None)
script_capture: ContextVar[TorchScriptCapture | None] = ContextVar("htp_export_torchscript", default=None)
translations_read: ContextVar[dict[tuple[tuple[str, Any], ...], Any] | None] = ContextVar(
    "htp_export_translations", default=None
)


@contextlib.contextmanager
def value_in(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a variable, and put back what it was."""
    token: Token[Any] = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
