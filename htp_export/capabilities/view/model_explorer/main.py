"""Model Explorer's adapter: ``model-explorer model.onnx --extensions=htp_export.capabilities.view.model_explorer``.

Model Explorer imports the module ``main`` of what it is given as an extension.
"""

from __future__ import annotations

from typing import Any

import model_explorer
from model_explorer import graph_builder

from htp_export.capabilities.view.inventory import take_inventory
from htp_export.capabilities.view.model_explorer.graphs import graph_of
from htp_export.editing.flattening import read_flat

__all__ = ["HtpExportAdapter", "as_graph"]


class HtpExportAdapter(model_explorer.Adapter):  # type: ignore[misc]
    """Opens ONNX files with their modules as layers, each with its class, fate, parameters and operators."""

    metadata = model_explorer.AdapterMetadata(
        id="htp_export",
        name="htp-export",
        description="ONNX files with the module hierarchy of PyTorch",
        fileExts=["onnx", "onnxtxt", "textproto"],
    )

    def convert(self, model_path: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The graph of a file, as Model Explorer's own classes."""
        return {"graphs": [as_graph(graph_of(take_inventory(read_flat(model_path))))]}


def as_graph(drawn: dict[str, Any]) -> graph_builder.Graph:
    """A graph of ``graph_of`` as Model Explorer's own classes."""
    return graph_builder.Graph(
        id=drawn["id"],
        nodes=[_as_node(node) for node in drawn["nodes"]],
        groupNodeAttributes=drawn["groupNodeAttributes"],
        nodeLabelsToHide=drawn["nodeLabelsToHide"],
    )


def _as_node(drawn: dict[str, Any]) -> graph_builder.GraphNode:
    return graph_builder.GraphNode(
        id=drawn["id"],
        label=drawn["label"],
        namespace=drawn["namespace"],
        attrs=_pairs(drawn["attrs"]),
        incomingEdges=[graph_builder.IncomingEdge(**edge) for edge in drawn["incomingEdges"]],
        inputsMetadata=_items(drawn["inputsMetadata"]),
        outputsMetadata=_items(drawn["outputsMetadata"]),
    )


def _items(listed: list[dict[str, Any]]) -> list[graph_builder.MetadataItem]:
    return [graph_builder.MetadataItem(id=item["id"], attrs=_pairs(item["attrs"])) for item in listed]


def _pairs(listed: list[dict[str, str]]) -> list[graph_builder.KeyValue]:
    return [graph_builder.KeyValue(key=pair["key"], value=pair["value"]) for pair in listed]
