"""From places in the chain of modules to the parts of a graph that run one after another, and models of these."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from htp_export.capabilities.partition.chain import Chain
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.model.cut_models import cut_graph, model_around, narrow_owners, output_name, write_part_metadata
from htp_export.model.cutting import Cut, Cutter
from htp_export.model.parts import Constants, weight_bytes
from htp_export.model.tagged import TaggedModel, all_nodes

__all__ = ["StageCut", "stage_cuts", "stage_model"]


@dataclass(frozen=True)
class StageCut:
    """The part of a graph that one stage runs.

    Attributes:
        part: The part.
        modules: The outermost modules that are whole in it, in order of execution.
        sources: Input → the stage that computes it; None where it is an input of the model.
        parameter_bytes: Bytes of the initializers that no stage before has.
    """

    part: Cut
    modules: tuple[str, ...]
    sources: Mapping[str, int | None]
    parameter_bytes: int


def stage_cuts(
    tagged: TaggedModel, cutter: Cutter, constants: Constants, chain: Chain, starts: Sequence[int]
) -> list[StageCut]:
    """Cut a model before some units of its chain.

    The stages are cut from the last one to the first: what one needs of those before it is what these have to give.

    Args:
        tagged: The model.
        cutter: Its cutter.
        constants: Its constants.
        chain: Its chain.
        starts: The borders, in order; every stage but the first begins at one.

    Raises:
        InputError: If a stage computes nothing that is needed.
    """
    homes = _Homes(chain, starts)
    wanted: list[dict[str, ir.Value]] = [{} for _ in range(len(starts) + 1)]
    for value in tagged.model.graph.outputs:
        wanted[homes.of(value)][output_name(value)] = value
    modules = _whole_modules(tagged, chain, homes)
    found: list[StageCut] = []
    for number in reversed(range(len(wanted))):
        if not wanted[number]:
            raise InputError(
                f"the stage that begins at module {_begins(chain, starts, number)!r} would compute nothing that the "
                "stages after it or the model's outputs need; leave it out"
            )
        part = cutter.cut_nodes(homes.nodes[number], wanted[number], _holding(constants, homes, number))
        part = replace(part, inputs={_input_name(value): value for value in part.inputs.values()})
        sources: dict[str, int | None] = {}
        for name, value in part.inputs.items():
            sources[name] = None if _is_model_input(value) else homes.of(value)
            if not _is_model_input(value):
                wanted[homes.of(value)][name] = value
        found.append(StageCut(part, modules.get(number, ()), sources, 0))
    seen: set[ir.Value] = set()
    stages = []
    for stage in reversed(found):
        new = [value for value in stage.part.initializers if value not in seen]
        seen.update(new)
        stages.append(replace(stage, parameter_bytes=weight_bytes(new)))
    return stages


class _Homes:
    """Which stage makes a value, and which nodes each has."""

    def __init__(self, chain: Chain, starts: Sequence[int]) -> None:
        self._weights = {value: bisect_right(starts, place) for value, place in chain.weight_places.items()}
        self._stages = {node: bisect_right(starts, place) for node, place in chain.places.items()}
        self.nodes: list[set[ir.Node]] = [set() for _ in range(len(starts) + 1)]
        for node, stage in self._stages.items():
            self.nodes[stage].add(node)

    def of(self, value: ir.Value) -> int:
        """The stage that makes a value or holds it; the first for what has no place, inputs and cheap constants."""
        producer = value.producer()
        return self._weights.get(value, 0) if producer is None else self._stages.get(producer, 0)

    def of_node(self, node: ir.Node) -> int:
        return self._stages[node]


def _holding(constants: Constants, homes: _Homes, number: int) -> Callable[[ir.Value], bool]:
    """What a stage has of the constants: cheap ones, and the weights that it is the first to read."""

    def comes_along(value: ir.Value) -> bool:
        return constants.comes_along(value) or (value in constants.weights and homes.of(value) == number)

    return comes_along


def _is_model_input(value: ir.Value) -> bool:
    return value.is_graph_input() and not value.is_initializer()


def _input_name(value: ir.Value) -> str:
    return str(value.name) if _is_model_input(value) else output_name(value)


def _begins(chain: Chain, starts: Sequence[int], number: int) -> str:
    place = starts[number - 1] if number else 0
    return next((border.module for border in chain.borders if border.place == place), "")


def _whole_modules(tagged: TaggedModel, chain: Chain, homes: _Homes) -> dict[int, tuple[str, ...]]:
    """Stage → the outermost modules all of whose nodes it has, but for constants and sizes that may be anywhere."""
    stages: defaultdict[str, set[int]] = defaultdict(set)
    first: dict[str, int] = {}
    for node, place in chain.owned_places():
        for path in chain.lineage(chain.owner(node)):
            stages[path].add(homes.of_node(node))
            first[path] = min(first.get(path, place), place)
    whole: dict[str, int] = {path: next(iter(where)) for path, where in stages.items() if len(where) == 1}
    found: defaultdict[int, list[str]] = defaultdict(list)
    for path in sorted(whole, key=lambda path: first[path]):
        parent = tagged.hierarchy.parent(path)
        if parent is None or parent not in whole:
            found[whole[path]].append(path)
    return {stage: tuple(paths) for stage, paths in found.items()}


def stage_model(tagged: TaggedModel, stage: StageCut) -> ir.Model:
    """A stand-alone model of a stage; it shares the tensors of its weights with the whole model.

    Its module tree has the modules that have nodes in it, what lies below those that are whole, and what lies above.
    What PyTorch gave to modules and got back is kept for the whole ones.

    Args:
        tagged: The model that was cut.
        stage: The stage.
    """
    graph, _ = cut_graph(tagged, stage.part)
    model = model_around(tagged, graph)
    tree = tagged.hierarchy
    modules = frozenset(stage.modules)
    whole = {path for path in tree if any(up in modules for up in tags.ancestors(path))}
    first = {owners[0] for node in all_nodes(model) if (owners := tagged.owners_of(node))}
    inside = whole | first | tags.all_above(first) | {""}
    narrow_owners(tagged, model, inside.__contains__, "")
    stage_tree = Hierarchy(tree[path] for path in tree if path in inside)
    signatures = {path: calls for path, calls in tagged.signatures.items() if path in whole}
    write_part_metadata(tagged, model, stage_tree, tagged.calls.among(stage_tree), signatures, inside.__contains__)
    return model
