"""One graph of a page: a model, its numbers, and how it was got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from htp_export.capabilities.view.inventory import Inventory, take_inventory
from htp_export.capabilities.view.measures import Measure, measures_of
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel

__all__ = ["COSTS", "ShownGraph", "shown_graph"]

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
    from htp_export.capabilities.cost.costing import cost

    inventory = take_inventory(tagged, name, statistics)
    try:
        costs = cost(tagged)
    except InputError as error:
        return ShownGraph(inventory, note=f"FLOPs and activations are not known: {error}")
    measures = tuple(measure for measure in measures_of(costs) if measure.key in COSTS)
    note = f"FLOPs and activations: {', '.join(costs.assumed)}." if costs.assumed else ""
    return ShownGraph(inventory, measures, note=note)
