"""Model Explorer's own server, on this machine alone, with a model of ours in it."""

from __future__ import annotations

from collections.abc import Sequence

from htp_export.analyze.inventory import Inventory
from htp_export.analyze.measures import Measure
from htp_export.show.model_explorer.application import MissingApplicationError
from htp_export.show.model_explorer.graphs import GRAPH_ID, graph_of
from htp_export.show.model_explorer.overlays import overlays_of

__all__ = ["serve"]

_LOOPBACK = "127.0.0.1"


def serve(inventory: Inventory, measures: Sequence[Measure], port: int = 8080) -> None:
    """Open a model in Model Explorer's server, until it is interrupted.

    Args:
        inventory: The model.
        measures: What is laid over the graph.
        port: Where it listens, on the loopback interface only; from 8080, the next free one.

    Raises:
        MissingApplicationError: If Model Explorer is not installed.
    """
    try:
        import model_explorer
        from model_explorer.node_data_builder import GraphNodeData, ModelNodeData, NodeDataResult
    except ImportError as error:
        raise MissingApplicationError(
            f"--serve opens Model Explorer's server, which is not there ({error}); "
            "install it with: pip install 'htp-export[view]'"
        ) from error
    from htp_export.show.model_explorer.main import as_graph

    config = model_explorer.config()
    config.graphs_list.append({"graphs": [as_graph(graph_of(inventory, measures))]})
    config.model_sources.append({"url": f"graphs://{inventory.name.replace('/', '_')}/0"})
    for overlay in overlays_of(inventory, measures):
        data = overlay["data"][GRAPH_ID]
        found = {name: NodeDataResult(**result) for name, result in data["results"].items()}
        config.add_node_data(overlay["name"], ModelNodeData({GRAPH_ID: GraphNodeData(results=found)}))
    model_explorer.visualize_from_config(config, host=_LOOPBACK, port=port)
