"""Records of the original nodes that moved into functions, from which `inline` restores them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from htp_export.capabilities.functions.bodies import Bodies, Occurrence, copy_value
from htp_export.editing.edit import Edit
from htp_export.editing.function_records import Expectations, Record, given_values, written_type
from htp_export.format.call_tree import CallTree, Instance
from htp_export.format.tags import Reason
from htp_export.lineage.tagging import Owned
from htp_export.shapes.operator_kinds import subgraphs


def share_bodies(
    bodies: Bodies, sources: Mapping[ir.Node, ir.Node], calls: CallTree
) -> dict[str, Record]:
    """Make the tags and types of shared bodies hold for all calls.

    Name of each outer call → its differences.

    ``sources``: each node except for the calls → its original in the unchanged model.
    """
    occurrences, hierarchy = bodies.occurrences, bodies.hierarchy
    originals: dict[ir.Node, ir.Node] = {}
    originals_of: defaultdict[ir.Node, list[ir.Node]] = defaultdict(list)
    for occurrence in occurrences.values():
        for shared, own in occurrence.pairs():
            originals[own] = sources[own] if own in sources else _snapshot(own)
            originals_of[shared].append(originals[own])
    for shared, nodes in originals_of.items():
        _share(bodies.edit, shared, nodes)

    expected = Expectations(hierarchy, calls)

    def record(occurrence: Occurrence, instance: Instance) -> Record:
        """Name of a node of the body → the differences of the original in one call."""
        differences: Record = {}
        returned = set(occurrence.function.outputs)
        for shared, own in occurrence.pairs():
            metadata = expected.metadata(shared, instance)
            entry = _difference(shared, originals[own], metadata, returned)
            if own in occurrences:
                inside = record(occurrences[own], expected.instance(shared, instance))
                entry = {"outputs": entry["outputs"]} if "outputs" in entry else {}
                if inside:
                    entry["inside"] = inside
            if entry:
                differences[str(shared.name)] = entry
        return differences

    inner = {own for occurrence in occurrences.values() for own in occurrence.body.all_nodes()}
    records: dict[str, Record] = {}
    for call, occurrence in occurrences.items():
        if call not in inner:
            entry = record(occurrence, occurrence.instance)
            if entry:
                records[str(call.name)] = entry
    return records


def flat_order(bodies: Bodies, sources: Mapping[ir.Node, ir.Node]) -> list[int]:
    """The original positions of all nodes in the order of the bodies.

    Empty if it is the same order.
    """

    def flat(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
        for node in nodes:
            if node in bodies.occurrences:
                yield from flat(bodies.occurrences[node].body)
            else:
                yield sources[node]

    nodes = list(flat(bodies.model.graph))
    positions = {node: position for position, node in enumerate(nodes[0].graph or ())}
    order = [positions[node] for node in nodes]
    return [] if order == sorted(order) else order


def _snapshot(call: ir.Node) -> ir.Node:
    """A copy of a call with its present tags, which change when its body is shared."""
    return ir.Node(
        call.domain,
        call.op_type,
        [],
        outputs=[copy_value(value) for value in call.outputs],
        name=call.name,
        metadata_props=dict(call.metadata_props),
    )


def _share(edit: Edit, shared: ir.Node, originals: Sequence[ir.Node]) -> None:
    """Set the tags and types of a node of a body so that they hold for all its originals."""
    if len(originals) == 1:
        return
    _share_tags(edit, shared, originals)
    for position, value in enumerate(shared.outputs):
        first, *others = [original.outputs[position] for original in originals]
        if any(other.type != first.type for other in others):
            value.type = value.shape = None
        elif any(written_type(other) != written_type(first) for other in others):
            value.shape = None


def _share_tags(edit: Edit, shared: ir.Node, originals: Sequence[ir.Node]) -> None:
    tagged = [Owned.of(original.metadata_props) for original in originals]
    owners = tuple(dict.fromkeys(owner for owned in tagged for owner in owned.paths))
    if not owners:
        return
    calls = {owned.call for owned in tagged}
    call = next(iter(calls)) if len(calls) == 1 and len(owners) == 1 else ""
    reasons = {owned.reason for owned in tagged}
    reason = next(iter(reasons)) if len(reasons) == 1 else Reason.SHARED
    if len(owners) > 1 and reason == Reason.SCOPE:
        reason = Reason.SHARED
    edit.set_owners(shared, Owned(owners, reason, call))


def _difference(
    shared: ir.Node, original: ir.Node, metadata: Mapping[str, str], returned: Collection[ir.Value]
) -> Record:
    """The entries that ``restore`` needs.

    The outputs of a function have the names and types of the outputs of its calls.
    """
    entry: Record = {}
    if shared.name != (original.name or ""):
        entry["name"] = original.name or ""
    changes = _changes(metadata, original.metadata_props)
    if changes:
        entry["metadata"] = changes
    outputs: Record = {}
    for position, (value, before) in enumerate(zip(shared.outputs, original.outputs, strict=True)):
        difference = {} if value in returned else _output_difference(value, before)
        if difference:
            outputs[str(position)] = difference
    if outputs:
        entry["outputs"] = outputs
    if _graph_names(shared) != _graph_names(original):
        entry["graphs"] = _graph_names(original)
    return entry


def _output_difference(value: ir.Value, original: ir.Value) -> Record:
    entry: Record = {}
    if value.name != original.name:
        entry["name"] = original.name
    changes = _changes(value.metadata_props, original.metadata_props)
    if changes:
        entry["metadata"] = changes
    if written_type(value) != written_type(original):
        entry["type"] = written_type(original)
    return entry


def _graph_names(node: ir.Node) -> list[list[str]]:
    """For each subgraph: its name, and the names of its inputs and initializers."""
    names: list[list[str]] = []
    for graph in subgraphs(node):
        values = [value.name for value in given_values(graph)]
        names.append([str(name or "") for name in (graph.name, *values)])
    return names


def _changes(expected: Mapping[str, str], actual: Mapping[str, str]) -> dict[str, str | None]:
    """The differences of two mappings; None for a key that the actual one does not have."""
    removed = {key: None for key in expected if key not in actual}
    changed = {key: text for key, text in actual.items() if expected.get(key) != text}
    return {**removed, **changed}
