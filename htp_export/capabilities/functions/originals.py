"""What the nodes that went into functions were, kept for the way back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from htp_export.capabilities.functions.bodies import Bodies, Occurrence, copy_value
from htp_export.editing.function_records import Expectations, Record, given_values, written_type
from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.tags import Reason
from htp_export.lineage.owner_rule import Owned
from htp_export.shapes.operator_kinds import subgraphs


def share_bodies(
    bodies: Bodies, sources: Mapping[ir.Node, ir.Node], calls: CallTree
) -> dict[str, Record]:
    """Make the bodies of functions true for all their calls, and return what each outer call loses by it, by its name.

    ``sources`` are the nodes of the untouched model that all nodes but the calls were.
    """
    occurrences, hierarchy = bodies.occurrences, bodies.hierarchy
    originals: dict[ir.Node, ir.Node] = {}
    alike: defaultdict[ir.Node, list[ir.Node]] = defaultdict(list)
    for occurrence in occurrences.values():
        for shared, own in occurrence.pairs():
            originals[own] = sources[own] if own in sources else _snapshot(own)
            alike[shared].append(originals[own])
    for shared, found in alike.items():
        _share(shared, found, hierarchy)

    expected = Expectations(hierarchy, calls)

    def record(occurrence: Occurrence, instance: Instance) -> Record:
        found: Record = {}
        returned = set(occurrence.function.outputs)
        for shared, own in occurrence.pairs():
            entry = _difference(
                shared, originals[own], expected.metadata(shared, instance), returned
            )
            if own in occurrences:
                inside = record(occurrences[own], expected.instance(shared, instance))
                entry = {key: value for key, value in entry.items() if key == "outputs"}
                if inside:
                    entry["inside"] = inside
            if entry:
                found[str(shared.name)] = entry
        return found

    inner = {own for occurrence in occurrences.values() for own in occurrence.body.all_nodes()}
    outer = {call: occurrence for call, occurrence in occurrences.items() if call not in inner}
    written = {
        str(call.name): record(occurrence, occurrence.instance)
        for call, occurrence in outer.items()
    }
    return {name: entry for name, entry in written.items() if entry}


def flat_order(bodies: Bodies, sources: Mapping[ir.Node, ir.Node]) -> list[int]:
    """The order of ``Records``."""

    def flat(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
        for node in nodes:
            if node in bodies.occurrences:
                yield from flat(bodies.occurrences[node].body)
            else:
                yield sources[node]

    nodes = list(flat(bodies.model.graph))
    places = {node: place for place, node in enumerate(nodes[0].graph or ())}
    order = [places[node] for node in nodes]
    return [] if order == sorted(order) else order


def _snapshot(call: ir.Node) -> ir.Node:
    """What a call says now: it will say it of all calls that share its place in a function."""
    outputs = [copy_value(value) for value in call.outputs]
    return ir.Node(
        call.domain,
        call.op_type,
        [],
        outputs=outputs,
        name=call.name,
        metadata_props=dict(call.metadata_props),
    )


def _share(shared: ir.Node, found: Sequence[ir.Node], hierarchy: Hierarchy) -> None:
    """Make a node of a body true for all that it stands for."""
    if len(found) == 1:
        return
    tagged = [Owned.of(one.metadata_props) for one in found]
    owners = tuple(dict.fromkeys(owner for owned in tagged for owner in owned.paths))
    if owners:
        reasons = {owned.reason for owned in tagged}
        calls = {owned.call for owned in tagged}
        one_call = next(iter(calls)) if len(calls) == 1 and len(owners) == 1 else ""
        reason = next(iter(reasons)) if len(reasons) == 1 else Reason.SHARED
        if len(owners) > 1 and reason == Reason.SCOPE:
            reason = Reason.SHARED
        Owned(owners, reason, one_call).write(shared.metadata_props, hierarchy.called)
        if all(tags.NAMESPACE not in one.metadata_props for one in found):
            del shared.metadata_props[tags.NAMESPACE]
    for position, value in enumerate(shared.outputs):
        others = [one.outputs[position] for one in found]
        if any(other.type != others[0].type for other in others):
            value.type = value.shape = None
        elif any(written_type(other) != written_type(others[0]) for other in others):
            value.shape = None


def _difference(
    shared: ir.Node, original: ir.Node, metadata: Mapping[str, str], returned: Collection[ir.Value]
) -> Record:
    """What ``restore`` needs; what a function returns is named and typed by its call."""
    entry: Record = {}
    if shared.name != (original.name or ""):
        entry["name"] = original.name or ""
    changes = _changes(metadata, original.metadata_props)
    if changes:
        entry["metadata"] = changes
    outputs: Record = {}
    for position, (value, before) in enumerate(zip(shared.outputs, original.outputs, strict=True)):
        if value in returned:
            continue
        written: Record = {}
        if value.name != before.name:
            written["name"] = before.name
        changes = _changes(value.metadata_props, before.metadata_props)
        if changes:
            written["metadata"] = changes
        if written_type(value) != written_type(before):
            written["type"] = written_type(before)
        if written:
            outputs[str(position)] = written
    if outputs:
        entry["outputs"] = outputs
    if _graph_names(shared) != _graph_names(original):
        entry["graphs"] = _graph_names(original)
    return entry


def _graph_names(node: ir.Node) -> list[list[str]]:
    return [
        [str(value or "") for value in (graph.name, *(one.name for one in given_values(graph)))]
        for graph in subgraphs(node)
    ]


def _changes(expected: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str | None]:
    gone = {key: None for key in expected if key not in found}
    return {**gone, **{key: value for key, value in found.items() if expected.get(key) != value}}
