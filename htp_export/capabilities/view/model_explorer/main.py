"""Model Explorer's adapter: ``--extensions=htp_export.capabilities.view.model_explorer``.

Model Explorer imports the module ``main`` of an extension.
"""

from __future__ import annotations

from typing import Any

import model_explorer
from model_explorer import graph_builder

from htp_export.capabilities.view.inventory import take_inventory
from htp_export.capabilities.view.model_explorer.graphs import graph_of
from htp_export.editing.flattening import read_flat


class HtpExportAdapter(model_explorer.Adapter):  # type: ignore[misc]
    """Opens ONNX files with their modules as layers: class, fate, parameters and operators."""

    metadata = model_explorer.AdapterMetadata(
        id="htp_export",
        name="htp-export",
        description="ONNX files with the module hierarchy of PyTorch",
        fileExts=["onnx", "onnxtxt", "textproto"],
    )

    def convert(self, model_path: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The graph of a file. Model Explorer serializes its own classes, and dicts inside them."""
        drawn = graph_of(take_inventory(read_flat(model_path)))
        nodes = [graph_builder.GraphNode(**node) for node in drawn.pop("nodes")]
        return {"graphs": [graph_builder.Graph(nodes=nodes, **drawn)]}
