"""What a model would save if certain modules kept their intermediates on chip, all of them together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from htp_export.capabilities.cost.bindings import bind
from htp_export.capabilities.cost.memory import Timeline, traffic
from htp_export.capabilities.cost.shapes import run_by_shapes
from htp_export.editing.flattening import read_flat
from htp_export.model.tagged import ModelSource

__all__ = ["FusedCost", "cost_of_fusing"]


@dataclass(frozen=True)
class FusedCost:
    """Some modules of a model, and the same modules if each kept its intermediates on chip.

    Attributes:
        traffic_bytes: What their nodes read and write, one after another.
        fused_traffic_bytes: The same without their intermediates.
        peak_bytes: The most activation memory that the whole model takes while one of their nodes runs.
        fused_peak_bytes: The same without their intermediates.
    """

    traffic_bytes: int
    fused_traffic_bytes: int
    peak_bytes: int
    fused_peak_bytes: int


def cost_of_fusing(model: ModelSource, groups: Mapping[str, Collection[str]]) -> dict[str, FusedCost]:
    """Compute what a model saves if all modules of a group are fused, by the memory model of `cost`.

    Args:
        model: The model; open dimensions are 1.
        groups: Name → module paths; each module is fused alone, and the modules of a group at the same time.

    Returns:
        Name → memory and traffic.

    Raises:
        FileError: If the file cannot be read.
        InputError: If the number of dimensions of an input is unknown.

    Examples:
        >>> import torch, htp_export
        >>> block = lambda: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
        >>> net = torch.nn.Sequential(block(), block()).eval()
        >>> program = htp_export.export(net, (torch.randn(100),), verbose=False)
        >>> cost_of_fusing(program, {"blocks": ["0", "1"], "first": ["0"]})["blocks"]
        FusedCost(traffic_bytes=3200, fused_traffic_bytes=1600, peak_bytes=800, fused_peak_bytes=400)
    """
    tagged = read_flat(model)
    run = run_by_shapes(tagged, bind(tagged.model))
    timeline = Timeline(run)
    found = {}
    for name, paths in groups.items():
        internal = list(dict.fromkeys(life for path in paths for life in timeline.internal.get(path, ())))
        steps = [place for place, step in enumerate(run.steps) if not {*step.modules, ""}.isdisjoint(paths)]
        moved = 0
        for place in steps:
            read, written = traffic(run.steps[place])
            moved += sum(read.values()) + written
        found[name] = FusedCost(
            traffic_bytes=moved,
            fused_traffic_bytes=moved - timeline.traffic_of(internal),
            peak_bytes=timeline.peak_while(steps),
            fused_peak_bytes=timeline.peak_while(steps, internal),
        )
    return found
