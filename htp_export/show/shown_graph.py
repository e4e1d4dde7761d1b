"""One graph of a page: a model, its numbers, and how it was got."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import onnx_ir as ir

from htp_export.costs.costing import cost
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.cut_models import cut_model
from htp_export.model.cutting import Cutter
from htp_export.model.tagged import TaggedModel, load
from htp_export.show.inventory import Inventory, take_inventory
from htp_export.show.measures import Measure, measures_of

__all__ = ["COSTS", "ShownGraph", "shown_graph", "shown_part"]

COSTS = ("flops", "other_flops", "activation_bytes")
"""The measures that every graph of a page has, if they can be computed."""


@dataclass(frozen=True)
class ShownGraph:
    """A graph that a page shows. A page with several has a choice between their titles.

    Attributes:
        inventory: Its modules and nodes.
        measures: Its own numbers by module and node; results that the user gives come before them.
        title: Its name in the choice; the name of the inventory if it is empty.
        note: How it was got, as a sentence; it is shown with the graph.
    """

    inventory: Inventory
    measures: Sequence[Measure] = ()
    title: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """Its title, or the name of its inventory."""
        return self.title or self.inventory.name

    def with_results(self, results: Sequence[Measure]) -> ShownGraph:
        """The same graph with numbers that the user gave, which replace those of the same key."""
        given = {measure.key for measure in results}
        kept = [measure for measure in self.measures if measure.key not in given]
        return replace(self, measures=(*results, *kept))


def shown_graph(tagged: TaggedModel, name: str = "", statistics: bool = False) -> ShownGraph:
    """A graph with its FLOPs and activations, as `htp_export.cost` counts them.

    Open dimensions are 1, as in ``cost``; the note says so. If the costs cannot be computed, the note has the reason.

    Args:
        tagged: The model.
        name: What to call it; the graph's own name if it is empty.
        statistics: Read every weight, and say what its values are like.

    Raises:
        InputError: If a weight is to be read and cannot be.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> shown = shown_graph(htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False)))
        >>> [(measure.title, measure.total[""]) for measure in shown.measures]
        [('FLOPs', 48.0), ('other FLOPs', 12.0), ('activations', 48.0)]
    """
    inventory = take_inventory(tagged, name, statistics)
    try:
        costs = cost(tagged)
    except InputError as error:
        return ShownGraph(inventory, note=f"FLOPs and activations are not known: {error}")
    measures = tuple(measure for measure in measures_of(costs) if measure.key in COSTS)
    note = f"FLOPs and activations: {', '.join(costs.assumed)}." if costs.assumed else ""
    return ShownGraph(inventory, measures, note=note)


def shown_part(tagged: TaggedModel, members: Set[ir.Node], title: str, note: str) -> ShownGraph:
    """Some nodes of a model as a graph of its own: what enters them are its inputs, what others read its outputs.

    Numbers are those of these nodes; the parameters of a module are the weights that they read.

    Args:
        tagged: The model.
        members: Nodes of its main graph.
        title: Its name in the choice.
        note: How it was got, as a sentence.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3)).eval()
        >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> part = shown_part(tagged, {*tagged["0"].nodes, *tagged["1"].nodes}, "the first half", "")
        >>> [node.op_type for node in part.inventory.nodes], part.inventory.modules[""].parameters
        (['Gemm', 'Relu'], 15)
    """
    ends = set(tagged.model.graph.outputs)
    outputs = {
        str(value.name): value
        for node in tagged.model.graph
        if node in members
        for value in node.outputs
        if value in ends or any(members.isdisjoint(tagged.index.scopes(use.node)) for use in value.uses())
    }
    model = cut_model(tagged, Cutter(tagged).cut_nodes(members, outputs))
    model.metadata_props.pop(tags.PARAMETERS, None)  # of a module that is only partly here, these are too many
    shown = shown_graph(load(model), tagged.model.graph.name or "")
    return replace(shown, title=title, note=" ".join(filter(None, (note, shown.note))))
