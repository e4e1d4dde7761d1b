"""Sessions that write the graph that they run, after ONNX Runtime has optimised it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from htp_export.errors import OnnxRuntimeError
from htp_export.runtime.sessions import LARGE_BYTES, OptionChanges, RunnableModel, Session, SessionSettings

_EXTERNAL_FILE = "session.optimized_model_external_initializers_file_name"
_EXTERNAL_SIZE = "session.optimized_model_external_initializers_min_size_in_bytes"


def session_and_graph(
    model: RunnableModel, settings: SessionSettings, folder: Path, changes: OptionChanges | None = None
) -> tuple[Session, ir.Model | None]:
    """Return a session and its optimised graph, without the values of weights.

    The graph is None if ONNX Runtime cannot write one, because an execution provider compiles parts of it. ONNX Runtime
    writes weights that are not in a file into the graph, or, which takes longer, into a file beside it if they are too
    large for a protobuf message. All files are in ``folder``.
    """
    changes = changes or OptionChanges()
    attempts: Sequence[str] = ["within", "beside", "none"] if model.size < LARGE_BYTES else ["beside", "none"]
    first: OnnxRuntimeError | None = None
    for attempt in attempts:
        written = folder / f"{attempt}.onnx"
        entries = {_EXTERNAL_FILE: f"{written.name}.data", _EXTERNAL_SIZE: "1024"} if attempt == "beside" else {}
        path = os.fspath(written) if attempt != "none" else ""
        attributes = {**changes.attributes, "optimized_model_filepath": path}
        try:
            session = Session(model, settings, OptionChanges(attributes, {**changes.entries, **entries}))
        except OnnxRuntimeError as error:
            first = first or error
        else:
            return session, ir.from_proto(onnx.load(written, load_external_data=False)) if path else None
    assert first is not None
    raise first
