"""`export` and `tagging`: ``torch.onnx.export`` with module tags. Only the sequence; the work is in the rows above."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from htp_export.capture import torch_internals
from htp_export.capture.dynamo import DynamoCapture
from htp_export.capture.modules import ModuleNames
from htp_export.capture.torchscript import TorchScriptCapture
from htp_export.hierarchy import Hierarchy, ModuleInfo
from htp_export.owners.write import make_tags

if TYPE_CHECKING:
    import torch

IR_VERSION = 10  # the first with metadata on nodes


class _Exporter:
    """What runs in place of torch's exporters while tags are wanted."""

    def dynamo(self, export: Callable[[], Any], model: Any) -> Any:
        names = ModuleNames(model)
        capture = DynamoCapture(names.paths, names.aliases)
        token = torch_internals.dynamo_capture.set(capture)
        try:
            with torch_internals.DYNAMO.held():
                program = export()
        finally:
            torch_internals.dynamo_capture.reset(token)
        record, nodes = capture.finish(program.model)
        made = make_tags(record, names.hierarchy or Hierarchy(ModuleInfo(p, c) for p, c in {"": "", **capture.classes}.items()))
        for node, metadata in zip(nodes, made.nodes, strict=True):
            node.metadata_props.update(metadata)
        program.model.metadata_props.update(made.model)
        program.model.graph.name = made.graph_name
        program.model.ir_version = max(program.model.ir_version, IR_VERSION)
        return program

    def torchscript(self, export: Callable[[], Any], model: Any, names_inputs: bool) -> Any:
        names = ModuleNames(model)
        capture = TorchScriptCapture(names.paths, torch_internals.scope_names(names.paths), torch_internals.state_size(model), names_inputs)
        self.names=names
        token = torch_internals.script_capture.set(capture)
        try:
            with torch_internals.TORCHSCRIPT.held(), torch_internals.attention_fast_path_off():
                return export()
        finally:
            torch_internals.script_capture.reset(token)

    def tagged_file(self, model_bytes):
        capture = torch_internals.script_capture.get()
        if capture.file is None or capture.file.data is not model_bytes:
            from htp_export.wire import SerializedModel
            capture.file = SerializedModel(model_bytes)
        record, nodes = capture.finish()
        made = make_tags(record, self.names.hierarchy)
        for node, metadata in zip(nodes, made.nodes, strict=True):
            for key, value in metadata.items():
                node.metadata_props.add(key=key, value=value)
        capture.file.metadata = made.model
        capture.file.graph_name = made.graph_name
        capture.file.ir_version = max(capture.file.ir_version, IR_VERSION)
        return capture.file.chunks()


@contextlib.contextmanager
def tagging() -> Iterator[None]:
    with torch_internals.ENTRIES.held():
        token = torch_internals.exporter.set(_Exporter())
        try:
            yield
        finally:
            torch_internals.exporter.reset(token)


def export(*args, **kwargs):
    import torch
    with tagging():
        return torch.onnx.export(*args, **kwargs)
