"""The graph of a PyTorch model that is named on the command line."""

from __future__ import annotations

from htp_export.capabilities.inspect.inspected import Inspected
from htp_export.capabilities.inspect.inspecting import inspect
from htp_export.command.model_options import SourceCall


def traced(call: SourceCall) -> Inspected:
    """The graph, by the best way that succeeds; see `htp_export.inspect`."""
    return inspect(call.model, call.args, kwargs=call.kwargs)
