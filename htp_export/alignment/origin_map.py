"""The original of a model: its summary and modules, from a model or from the map in a result."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import onnx_ir as ir

from htp_export.alignment.graph_summary import (
    NOTHING,
    GraphSummary,
    SummaryNode,
    SummaryValue,
    summarize,
)
from htp_export.editing.flattening import InlinedCall, dissolved, read_flat
from htp_export.editing.function_records import DOMAIN
from htp_export.errors import InputError, UntaggedModelError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.json_text import parse_json
from htp_export.format.parameters import ModuleParameters, parameters_from_json
from htp_export.format.signatures import Signature, signatures_from_json
from htp_export.model.model_faults import names_model_faults
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import ModelSource, TaggedModel, for_change, load

# Limits of untrusted text, in bytes of decompressed JSON.
_LARGEST = 1 << 28  # of any map; a million nodes take about 30 million
_MOST_FOLDED = 128  # for a character of text; modules 400 levels deep reach 28
_SMALL = 1 << 24  # always permitted, as short texts may compress better

T = TypeVar("T", bound=Hashable)


def map_to_text(summary: GraphSummary) -> str:
    """Return a summary as JSON, compressed, in base 85; with inferred shapes, without reasons.

    Examples:
        >>> relu = SummaryNode("Relu", "node", (0,), (1,), owners=("act",))
        >>> summary = GraphSummary([relu], [SummaryValue("x", kind="input"), SummaryValue("y")], [0], [1])
        >>> text_to_map(map_to_text(summary)) == summary
        True
    """
    nodes, values = summary.nodes, summary.values
    for index in range(len(values)):
        summary.shape(index)  # shapes cannot be inferred from the map
    columns = {
        "nodes": [
            _table(node.op for node in nodes),
            [node.name for node in nodes],
            [_relative(node.inputs, index) for index, node in enumerate(nodes)],
            [_relative(node.outputs, index) for index, node in enumerate(nodes)],
            _table(node.captured for node in nodes),
            _table(node.attributes for node in nodes),
            _table(node.words for node in nodes),
            _table(node.scope for node in nodes),
            _table((node.holder, node.has_bodies) for node in nodes),
            _table((node.owners, node.call) for node in nodes),
        ],
        "values": [
            [value.name for value in values],
            _table((value.scope, value.shape, value.dtype, value.kind) for value in values),
            _table(value.content for value in values),
        ],
        "inputs": summary.inputs,
        "outputs": summary.outputs,
    }
    plain = json.dumps(columns, separators=(",", ":"), ensure_ascii=False).encode()
    return base64.b85encode(zlib.compress(plain, 9)).decode()


def text_to_map(text: str) -> GraphSummary:
    """Return the summary that `map_to_text` wrote; raise ValueError for any other text."""
    try:
        limit = min(_LARGEST, max(_SMALL, _MOST_FOLDED * len(text)))
        decompressor = zlib.decompressobj()
        plain = decompressor.decompress(base64.b85decode(text), limit)
        if decompressor.unconsumed_tail:
            raise ValueError("it is too large")
        return _summary(parse_json(plain))
    except (ValueError, TypeError, KeyError, IndexError, zlib.error, binascii.Error) as error:
        raise ValueError(f"{tags.MAP} is not what the file format says: {error}") from error


def _summary(columns: dict[str, Any]) -> GraphSummary:
    """Check the columns of a map, and build the summary."""
    op, names, inputs, outputs, captured, attributes, words, scopes, held, owned = columns["nodes"]
    value_names, kinds, contents = columns["values"]
    values = []
    value_rows = zip(value_names, _listed(kinds), _listed(contents), strict=True)
    for name, (scope, shape, dtype, kind), content in value_rows:
        dimensions = None if shape is None else tuple(shape)
        values.append(SummaryValue(_text(name), scope, dimensions, dtype, kind, _text(content)))
    rows = zip(
        *(_listed(op), names, inputs, outputs, _listed(captured), _listed(attributes)),
        *(_listed(words), _listed(scopes), _listed(held), _listed(owned)),
        strict=True,
    )
    nodes = [_node(index, row, len(values)) for index, row in enumerate(rows)]
    graph_inputs = list(_within(columns["inputs"], len(values)))
    graph_outputs = list(_within(columns["outputs"], len(values)))
    return GraphSummary(nodes, values, graph_inputs, graph_outputs)


def _node(index: int, row: tuple[Any, ...], count: int) -> SummaryNode:
    """Check one row of a map, and build the node; ``count``: the number of values."""
    op, name, inputs, outputs, captured, attributes, words, scope, held, owned = row
    holder, has_bodies = held
    owners, call = owned
    return SummaryNode(
        _text(op),
        _text(name),
        _absolute(inputs, index, count),
        _absolute(outputs, index, count),
        captured=_within(captured, count),
        attributes=_text(attributes),
        words=tuple(map(_text, words)),
        scope=_text(scope),
        holder=holder if NOTHING <= holder < index else NOTHING,
        has_bodies=bool(has_bodies),
        owners=tuple(map(_text, owners)),
        call=_text(call),
    )


def _table(column: Iterable[T]) -> list[Any]:
    """Return the distinct entries, and for each row the index of its entry."""
    entries: dict[T, int] = {}
    rows = [entries.setdefault(entry, len(entries)) for entry in column]
    return [list(entries), rows]


def _listed(table: Sequence[Any]) -> list[Any]:
    """Return the rows of a `_table`."""
    entries, rows = table
    return [entries[row] for row in rows]


def _relative(places: Sequence[int], index: int) -> list[int | None]:
    """Return values relative to the node's index, so that equal layers have equal numbers."""
    return [None if place == NOTHING else place - index for place in places]


def _absolute(places: Sequence[int | None], index: int, count: int) -> tuple[int, ...]:
    return _within([NOTHING if place is None else place + index for place in places], count)


def _within(places: Sequence[int], count: int) -> tuple[int, ...]:
    if not all(isinstance(place, int) and NOTHING <= place < count for place in places):
        raise ValueError("a value has a number that no value has")
    return tuple(places)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is not a string")
    return value


@dataclass(frozen=True)
class Origin:
    """The facts about the original model that `carry` needs."""

    summary: GraphSummary  # its nodes and their owners
    hierarchy: Hierarchy  # its modules
    signatures: Mapping[str, Sequence[Signature]]  # their inputs and outputs in PyTorch
    calls: CallTree  # their calls
    # metadata that no tool invalidates: parameters, calls, earlier steps
    lasting: Mapping[str, str]
    # module path → its parameters in PyTorch
    parameters: Mapping[str, ModuleParameters] = field(default_factory=dict)
    model: ir.Model | None = None  # None if only the map is known
    has_map: bool = False  # whether its metadata has a map


def from_model(tagged: TaggedModel, after: ir.Model) -> Origin:
    """Describe a tagged model; its flat graph if the tool inlined functions that are modules.

    A node of such a function represents one in each call. Inlined, each call has its own nodes.
    """
    if module_functions(tagged.model) != module_functions(after):
        inlined: list[InlinedCall] = []
        tagged = dissolved(tagged, inlined)
        restore_names(after, inlined)
    props = tagged.model.metadata_props
    known = tagged.hierarchy, tagged.signatures, _calls(props, tagged.hierarchy), _lasting(props)
    return Origin(
        _tagged_summary(tagged.model),
        *known,
        tagged.parameters or {},
        tagged.model,
        tags.MAP in props,
    )


def from_map(model: ir.Model) -> Origin:
    """Describe the original from the map in the metadata of a model.

    Raises:
        UntaggedModelError: There is no map.
        InputError: The metadata are not valid.
    """
    props = model.metadata_props
    if tags.MAP not in props or tags.MODULES not in props:
        raise UntaggedModelError(
            f"model {model.graph.name!r} does not say what it was made of; name the model before it too, "
            "carry(before, after), or use htp_export.embed_map(before) ahead of the tool"
        )
    try:
        signatures = (
            signatures_from_json(props[tags.SIGNATURES]) if tags.SIGNATURES in props else {}
        )
        parameters = (
            parameters_from_json(props[tags.PARAMETERS]) if tags.PARAMETERS in props else {}
        )
        hierarchy, summary = Hierarchy.from_json(props[tags.MODULES]), text_to_map(props[tags.MAP])
        tags.check_paths({*hierarchy, *(owner for node in summary.nodes for owner in node.owners)})
        hierarchy.check_calls(lambda: len(summary.nodes))
    except ValueError as error:
        raise InputError(f"model {model.graph.name!r}: {error}") from error
    return Origin(
        *(summary, hierarchy, signatures, _calls(props, hierarchy), _lasting(props), parameters),
        has_map=True,
    )


@names_model_faults("model")
def embed_map(model: ModelSource, output: str | os.PathLike[str] | None = None) -> ir.Model:
    """Write the map that `carry` needs into the metadata of a tagged model.

    `carry` can then restore the tags without this model. The map takes about 30 bytes a node:
    operators, names and shapes of tensors, and owners; no weights. Nearly all tools keep it.
    It describes the graph as it is now: passes, ``quantize``, ``splice`` and ``lora.insert`` remove
    it; `carry`, the adapters in ``htp_export.tools``, and all other functions that write a changed
    file rewrite it.

    Thread-safe, also for calls on the same model.

    Args:
        model: The tagged model; a model in memory is not changed.
        output: The file to write; None to only return the model.

    Returns:
        The model with the map.

    Raises:
        UntaggedModelError: The model has no tags of htp_export.
        FileError: A file cannot be read or written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> mapped = htp_export.embed_map(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> for node in mapped.graph:
        ...     node.metadata_props.clear()
        >>> htp_export.carry(mapped).recovered
        {'tensor': 2}
    """
    check_target(output)
    mapped = tagged_model(model)
    mapped.metadata_props[tags.MAP] = map_of(mapped)
    if output is not None:
        write_model(mapped, output)
    return mapped


def tagged_model(source: ModelSource) -> ir.Model:
    """Return a tagged model that may be changed: the model of a file, or a copy of one in memory.

    Raises:
        UntaggedModelError: It has no tags of htp_export, or lost some.
    """
    tagged = load(source)
    tagged.require_exact_tags()
    return for_change(tagged, source).model


def map_of(model: ir.Model) -> str:
    """Return the map of a tagged model's flat graph: a tool may inline module functions."""
    return map_to_text(_tagged_summary(read_flat(model, others=False).model))


def renew_map(model: ir.Model, *, had_map: bool) -> None:
    """Write the map of a changed model, in place, if the model had one before the change.

    If nodes have no tags, nothing is written: a map of the model before can still restore them.
    """
    if had_map and all(tags.MODULE in node.metadata_props for node in all_nodes(model)):
        model.metadata_props[tags.MAP] = map_of(model)


def module_functions(model: ir.Model) -> set[ir.OperatorIdentifier]:
    """Return the functions of a model that are modules."""
    return {key for key in model.functions if key[0] == DOMAIN}


def _tagged_summary(model: ir.Model) -> GraphSummary:
    """Return the summary of a model; raise UntaggedModelError if a node has no tags."""
    summary, _ = summarize(model, model.functions.values())
    lost = sum(not node.owners for node in summary.nodes)
    if lost:
        raise UntaggedModelError(
            f"{lost} nodes of model {model.graph.name!r} have no tags; carry them from the model as it was exported"
        )
    return summary


def _lasting(props: Mapping[str, str]) -> dict[str, str]:
    lasting = (tags.PARAMETERS, tags.FROZEN, tags.ASSUMED, tags.CALLERS, tags.PROVENANCE)
    return {key: props[key] for key in lasting if key in props}


def _calls(props: Mapping[str, str], hierarchy: Hierarchy) -> CallTree:
    try:
        return CallTree.from_json(props.get(tags.CALLERS), hierarchy)
    except ValueError as error:
        raise InputError(f"the first model: {error}") from error


_Key = tuple[ir.OperatorIdentifier, str, str]
"""Function, prefix and suffix that a tool adds to the names of its body for one call."""


def restore_names(after: ir.Model, calls: Sequence[InlinedCall]) -> None:
    """Name the tensors of inlined functions as in the flat graph, if their calls are identified.

    Inputs, outputs and initializers of ``after`` keep their names. ``calls`` are in the order in
    which they ran.
    """
    groups = _groups(after, calls)
    by_function: defaultdict[ir.OperatorIdentifier, list[InlinedCall]] = defaultdict(list)
    for call in calls:
        by_function[call.function].append(call)
    kept = {*after.graph.inputs, *after.graph.outputs, *after.graph.initializers.values()}
    used = {value.name for value in kept}
    for node in after.graph.all_nodes():
        used.update(value.name for value in node.outputs)
    renamed: dict[ir.Value, str] = {}
    for function, candidates in by_function.items():
        of_function = {key: values for key, values in groups.items() if key[0] == function}
        for key, call in _assigned(of_function, candidates).items():
            for name, value in groups[key].items():
                wanted = call.values[name].name
                if value not in kept and wanted and wanted not in used:
                    renamed[value] = wanted
                    used.add(wanted)
    for value, name in renamed.items():
        value.name = name


def _groups(after: ir.Model, calls: Iterable[InlinedCall]) -> dict[_Key, dict[str, ir.Value]]:
    """The tensors of each inlined call: name in the body → tensor, for the longest fitting name."""
    names = {call.function: set(call.values) for call in calls}
    found: defaultdict[_Key, dict[str, ir.Value]] = defaultdict(dict)
    for node in after.graph.all_nodes():
        for value in node.outputs:
            for function, inside in names.items():
                split = _split(value.name or "", function[1], inside)
                if split is not None:
                    front, name, back = split
                    found[function, front, back].setdefault(name, value)
    return dict(found)


def _split(text: str, function: str, names: set[str]) -> tuple[str, str, str] | None:
    """Split a name into a prefix, the name of a body, and a suffix; None if it contains none."""
    numbered = re.fullmatch(r"(.+?)(__\d+)", text)
    if numbered and numbered[1] in names:
        return "", numbered[1], numbered[2]
    if function not in text:
        return None
    for start in range(text.index(function) + len(function) + 1, len(text)):
        if text[start - 1] == "_" and text[start:] in names:
            return text[:start], text[start:], ""
    return None


def _assigned(
    groups: Mapping[_Key, Mapping[str, ir.Value]], calls: Sequence[InlinedCall]
) -> dict[_Key, InlinedCall]:
    """Group → the call whose weights its nodes read.

    Groups without a distinct call are assigned in order, if exactly as many calls remain.
    """
    readers = [_weights_by_name(call) for call in calls]
    remaining, waiting = dict(enumerate(calls)), list(groups)
    assigned: dict[_Key, InlinedCall] = {}
    for key in groups:
        votes: Counter[int] = Counter()
        for name, value in groups[key].items():
            weights = _weights(value)
            for number in remaining:
                votes[number] += len(weights & readers[number][name])
        best = votes.most_common(2)
        if not best or not best[0][1]:
            continue
        is_distinct = len(best) == 1 or best[0][1] > best[1][1]
        if is_distinct:
            assigned[key] = remaining.pop(best[0][0])
            waiting.remove(key)
    if len(waiting) == len(remaining):
        assigned.update(zip(waiting, remaining.values(), strict=True))
    return assigned


def _weights_by_name(call: InlinedCall) -> dict[str, set[str]]:
    """For each tensor of a call: the initializers that its producer reads."""
    return {name: _weights(value) for name, value in call.values.items()}


def _weights(value: ir.Value) -> set[str]:
    """The names of the initializers among the inputs of a value's producer."""
    names = set[str]()
    producer = value.producer()
    if producer is not None:
        for weight in producer.inputs:
            if weight is not None and weight.is_initializer():
                names.add(str(weight.name))
    return names
