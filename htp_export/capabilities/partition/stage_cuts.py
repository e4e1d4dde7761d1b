"""From places in the chain of modules to the stages that run one after another, each a model of its own."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.partition.chain import Chain
from htp_export.capabilities.partition.partitions import Partition, Stage, StageTensor
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.model.cut_models import cut_graph, model_around, narrow_owners, output_name, write_part_metadata
from htp_export.model.cutting import Cut
from htp_export.model.parts import weight_bytes
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.crashes import safe_entries


def stages_of(chain: Chain, starts: Sequence[int]) -> Partition:
    """A model cut before some units of its chain, in order: every stage but the first begins at one.

    The stages are cut from the last one to the first: what one needs of those before it is what these have to give. An
    `InputError` names a stage that computes nothing that is needed.
    """
    tagged, graph, homes = chain.tagged, chain.tagged.model.graph, _Homes(chain, starts)
    wanted: list[dict[str, ir.Value]] = [{} for _ in range(len(starts) + 1)]
    for value in graph.outputs:
        wanted[homes.of(value)][output_name(value)] = value
    cuts: list[tuple[Cut, dict[str, int | None]]] = []
    for number in reversed(range(len(wanted))):
        if not wanted[number]:
            place = starts[number - 1] if number else 0
            begins = next((border.module for border in chain.borders if border.place == place), "")
            raise InputError(
                f"the stage that begins at module {begins!r} would compute nothing that the stages after it or the "
                "model's outputs need; leave it out"
            )
        part = homes.cut(number, wanted[number])
        inputs: dict[str, ir.Value] = {}
        sources: dict[str, int | None] = {}
        for value in part.inputs.values():
            given = value.is_graph_input() and not value.is_initializer()
            name = str(value.name) if given else output_name(value)
            inputs[name], sources[name] = value, None if given else homes.of(value)
            if not given:
                wanted[homes.of(value)][name] = value
        cuts.append((replace(part, inputs=inputs), sources))
    modules = _whole_modules(chain, homes)
    seen: set[ir.Value] = set()
    stages = []
    for number, (part, sources) in enumerate(reversed(cuts)):
        new = [value for value in part.initializers if value not in seen]
        seen.update(new)
        stages.append(_stage(tagged, part, modules[number], sources, weight_bytes(new)))
    return Partition(
        tagged.hierarchy.root.simple_class or graph.name or "model",
        tuple(stages),
        {str(value.name): StageTensor.of(value) for value in graph.inputs if not value.is_initializer()},
        {str(value.name): (homes.of(value), output_name(value)) for value in graph.outputs},
        _versions(tagged),
    )


class _Homes:
    """Which stage makes a value, and which nodes each has."""

    def __init__(self, chain: Chain, starts: Sequence[int]) -> None:
        self._chain = chain
        self._weights = {value: bisect_right(starts, place) for value, place in chain.weight_places.items()}
        self.of_node = {node: bisect_right(starts, place) for node, place in chain.places.items()}
        self._nodes: defaultdict[int, set[ir.Node]] = defaultdict(set)
        for node, stage in self.of_node.items():
            self._nodes[stage].add(node)

    def of(self, value: ir.Value) -> int:
        """The stage that makes a value or holds it; the first for what has no place, inputs and cheap constants."""
        producer = value.producer()
        return self._weights.get(value, 0) if producer is None else self.of_node.get(producer, 0)

    def cut(self, number: int, wanted: Mapping[str, ir.Value]) -> Cut:
        """A stage, with the cheap constants that it needs and the weights that it is the first to read."""
        constants = self._chain.constants

        def comes_along(value: ir.Value) -> bool:
            return constants.comes_along(value) or (value in constants.weights and self.of(value) == number)

        return self._chain.cutter.cut_nodes(self._nodes[number], wanted, comes_along)


def _whole_modules(chain: Chain, homes: _Homes) -> Mapping[int, Sequence[str]]:
    """Stage → the outermost modules all of whose nodes it has, but for constants and sizes that may be anywhere."""
    stages: defaultdict[str, set[int]] = defaultdict(set)
    first: dict[str, int] = {}
    for node, place in chain.owned_places():
        for path in chain.lineage(chain.owner(node)):
            stages[path].add(homes.of_node[node])
            first[path] = min(first.get(path, place), place)
    whole = {path: next(iter(where)) for path, where in stages.items() if len(where) == 1}
    found: defaultdict[int, list[str]] = defaultdict(list)
    for path in sorted(whole, key=first.__getitem__):
        if chain.tagged.hierarchy.parent(path) not in whole:
            found[whole[path]].append(path)
    return found


def _stage(
    tagged: TaggedModel, part: Cut, modules: Sequence[str], sources: Mapping[str, int | None], parameter_bytes: int
) -> Stage:
    model = _stage_model(tagged, part, frozenset(modules))
    return Stage(
        tuple(modules),
        {str(value.name): StageTensor.of(value) for value in model.graph.inputs},
        {str(value.name): StageTensor.of(value) for value in model.graph.outputs},
        sources,
        sum(1 for _ in model.graph.all_nodes()),
        parameter_bytes,
        model=model,
        session_config=safe_entries(model),
    )


def _stage_model(tagged: TaggedModel, part: Cut, modules: frozenset[str]) -> ir.Model:
    """A stand-alone model of a stage; it shares the tensors of its weights with the whole model.

    Its module tree has the modules that have nodes in it, what lies below those that are whole, and what lies above.
    What PyTorch gave to modules and got back is kept for the whole ones.
    """
    graph, _ = cut_graph(tagged, part)
    model = model_around(tagged, graph)
    tree = tagged.hierarchy
    whole = {path for path in tree if any(up in modules for up in tags.ancestors(path))}
    first = {owners[0] for node in all_nodes(model) if (owners := tagged.owners_of(node))}
    inside = whole | first | tags.all_above(first) | {""}
    narrow_owners(tagged, model, inside.__contains__, "")
    stage_tree = Hierarchy(tree[path] for path in tree if path in inside)
    signatures = {path: calls for path, calls in tagged.signatures.items() if path in whole}
    write_part_metadata(tagged, model, stage_tree, tagged.calls.among(stage_tree), signatures, inside.__contains__)
    return model


def _versions(tagged: TaggedModel) -> dict[str, Any]:
    try:
        ours = version("htp-export")
    except PackageNotFoundError:  # run from its sources
        ours = "unknown"
    return {"htp_export": ours, "ir_version": tagged.model.ir_version, "opset": dict(tagged.model.opset_imports)}
