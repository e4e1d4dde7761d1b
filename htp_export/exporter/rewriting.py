"""Tagged ONNX models that libraries rewrite after the export, while tags are wanted: their tags are written once more.

They replace values by others, as torch's own optimizer does; so the capture goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from htp_export.exporter.capture.dynamo import DynamoCapture
from htp_export.exporter.capture.onnx_graph import nodes_of_model
from htp_export.exporter.capture.running import export_untagged, seam
from htp_export.exporter.owners.write import make_tags
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.parameters import ModuleParameters

IR_VERSION = 10  # the first with metadata on nodes


def write_tags(
    capture: DynamoCapture,
    model: ir.Model,
    hierarchy: Hierarchy | None,
    parameters: Mapping[str, ModuleParameters] | None,
) -> None:
    """Tag a model as it is now, in place of tags that it has.

    ``hierarchy`` is None if only the modules that ran are known; ``parameters`` are as of ``make_tags``.
    """
    with seam("matching the nodes of the ONNX graph with what the modules ran"):
        record, nodes = capture.finish(model)
    with seam("finding the owners of each node"):
        made = make_tags(record, hierarchy or Hierarchy.from_classes(capture.calls.classes), parameters)
    with seam("finding how the weights were made"):
        capture.write_recipes(model)
    for node, metadata in zip(nodes, made.nodes, strict=True):
        tags.tag_node(node.metadata_props, metadata)
    for key in tags.MODEL_KEYS:
        model.metadata_props.pop(key, None)
    model.metadata_props.update(made.model)
    model.graph.name = made.graph_name
    model.ir_version = max(model.ir_version, IR_VERSION)


class Rewriting:
    """One tagged model that others may rewrite; the arguments are those of `write_tags`."""

    _KEY = "htp.rewriting"  # in the model's ``meta``, so that it lives as long as the model

    def __init__(
        self,
        capture: DynamoCapture,
        model: ir.Model,
        hierarchy: Hierarchy | None,
        parameters: Mapping[str, ModuleParameters] | None,
    ) -> None:
        self._capture, self._model = capture, model
        self._hierarchy, self._parameters = hierarchy, parameters
        capture.follow(model)
        self._tagged = _state(model)
        model.meta[self._KEY] = self

    def replaced(self, old: ir.Value | None, new: ir.Value | None) -> None:
        """Note that ``new`` now stands where ``old`` stood, in whatever model."""
        self._capture.step("following a value of a model that is rewritten", self._capture.replaced_later, old, new)

    def settle(self) -> None:
        """Tag the model once more, if it changed; a `CaptureError` if that fails and the capture is strict."""
        now = _state(self._model)
        if now == self._tagged:
            return
        capture = self._capture
        capture.step(
            "tagging a model that was rewritten", write_tags, capture, self._model, self._hierarchy, self._parameters
        )
        self._tagged = now
        if capture.fault is not None:
            _untag(self._model)
            fault, capture.fault = capture.fault, None
            self.end()
            if capture.strict:
                raise fault
            export_untagged(fault)

    def end(self) -> None:
        """Forget the capture."""
        self._model.meta.pop(self._KEY, None)
        self._capture.withdraw(self._model)


def _state(model: ir.Model) -> list[Any]:
    """What tags depend on: nodes, values and their names. Values are compared by identity."""
    given = [(value, value.name) for value in (*model.graph.inputs, *model.graph.outputs)]
    return [given, *((node, node.inputs, [value.name for value in node.outputs]) for node in nodes_of_model(model))]


def _untag(model: ir.Model) -> None:
    for node in nodes_of_model(model):
        tags.tag_node(node.metadata_props, {})
    for key in tags.MODEL_KEYS:
        model.metadata_props.pop(key, None)
