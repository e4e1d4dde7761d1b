"""Functions dissolved into the graph that calls them; nodes are as they were before `functions`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from htp_export.editing.editing import replace_uses
from htp_export.editing.function_records import (
    DOMAIN,
    Expectations,
    Record,
    Records,
    entry_of,
    give_tags_of_call,
    restore,
)
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance
from htp_export.format.hierarchy import Hierarchy
from htp_export.model.model_faults import names_model_faults
from htp_export.model.neighbours import replace_inputs
from htp_export.model.regions import all_nodes, all_values
from htp_export.model.tagged import ModelSource, TaggedModel, for_change, load
from htp_export.model.tensor_names import UsedNames, rename
from htp_export.shapes.operator_kinds import reads_of

_log = logging.getLogger(__name__)

_CALLER = "htp.caller"  # never written to files


@names_model_faults("source")
def read_flat(source: ModelSource, *, others: bool = True) -> TaggedModel:
    """Read a model and dissolve its functions, so that each node is in its module.

    Functions that cannot be dissolved stay, with a warning: one that calls itself, or has graphs as
    attributes. Functions that are not modules are dissolved only with ``others``. A model in memory
    is not changed.

    Raises:
        FileError: If a file cannot be read.
        InputError: If the flat graph is too large.
    """
    tagged = load(source)
    if not any(others or domain == DOMAIN for domain, _, _ in tagged.model.functions):
        return tagged
    try:
        return load(flattened(tagged)[0]) if others else dissolved(tagged)
    except InputError as error:
        _log.warning("functions are looked at apart from the nodes that call them: %s", error)
        return tagged


def read_for_change(source: ModelSource) -> TaggedModel:
    """Read a model for changes, without functions of `functions`; one in memory is copied."""
    return for_change(read_flat(source, others=False), source)


def flattened(tagged: TaggedModel) -> tuple[ir.Model, dict[str, int]]:
    """Return a copy of a model without functions, and their numbers of calls; see `read_flat`."""
    model = tagged.model.clone()
    counts = dissolve(model, tagged.hierarchy, tagged.calls)
    return model, counts | _inline_others(model)


def dissolved(tagged: TaggedModel, inlined: list[InlinedCall] | None = None) -> TaggedModel:
    """Return a copy of a model without the functions of `functions`; see `dissolve`."""
    work = tagged.clone()
    dissolve(work.model, work.hierarchy, work.calls, inlined)
    return work


def dissolve(
    model: ir.Model, hierarchy: Hierarchy, calls: CallTree, inlined: list[InlinedCall] | None = None
) -> dict[str, int]:
    """Inline the functions of `functions`, in place.

    ``inlined``: A list that gets an entry for each call, in order.

    Returns:
        Identifier of each function → its number of calls.

    Raises:
        InputError: If a function calls itself, or the metadata about functions are not valid.
    """
    functions = {key: each for key, each in model.functions.items() if each.domain == DOMAIN}
    dissolver = _Dissolver(functions, Expectations(hierarchy, calls), model.graph, inlined)
    try:
        written = Records.from_json(model.metadata_props.get(tags.FUNCTIONS, "{}"))
        calling = [node for node in model.graph.all_nodes() if node.op_identifier() in functions]
        for call in calling:
            dissolver.dissolve(call, entry_of(written.calls, str(call.name)))
    except ValueError as error:
        raise InputError(
            f"model {model.graph.name!r}: its functions cannot be inlined: {error}"
        ) from error
    _reorder(model.graph, written.order)
    for key in functions:
        del model.functions[key]
    model.metadata_props.pop(tags.FUNCTIONS, None)
    if functions and all(node.domain != DOMAIN for node in all_nodes(model)):
        model.opset_imports.pop(DOMAIN, None)
        for function in model.functions.values():
            function.opset_imports.pop(DOMAIN, None)
    return dissolver.counts


@dataclass(frozen=True)
class InlinedCall:
    """One inlined call: name in the function's body → value in the flat graph.

    An inner call that is inlined later replaces its values.
    """

    function: ir.OperatorIdentifier
    values: Mapping[str, ir.Value]


_Call: TypeAlias = tuple[ir.Node, Record, Instance, tuple[ir.OperatorIdentifier, ...]]
"""A call to replace, the record of its nodes, its module call, and the functions around it."""


class _Dissolver:
    """Replaces calls by copies of the functions' bodies, as they were in the flat graph.

    ``onnx_ir``'s ``InlinePass``, which inlines all other functions, renames every node and tensor
    and merges the metadata of the call into it. The records of original nodes are by name in the
    function's body.
    """

    def __init__(
        self,
        functions: Mapping[ir.OperatorIdentifier, ir.Function],
        expected: Expectations,
        graph: ir.Graph,
        inlined: list[InlinedCall] | None,
    ) -> None:
        self._functions, self._expected, self._inlined = functions, expected, inlined
        # input of an inlined body → the argument
        self._arguments: dict[ir.Value, ir.Value | None] = {}
        self.counts = {f"{domain}::{name}": 0 for domain, name, _ in functions}
        self._node_names = UsedNames(str(node.name) for node in graph.all_nodes())
        self._value_names = UsedNames(str(value.name) for value in all_values(graph))

    def dissolve(self, call: ir.Node, record: Record) -> None:
        """Replace a call, and the calls in its body; a ValueError if a function calls itself."""
        waiting: list[_Call] = [(call, record, self._expected.instance(call, Instance("")), ())]
        while waiting:
            waiting += reversed(self._replace(*waiting.pop()))

    def _replace(
        self,
        call: ir.Node,
        record: Record,
        instance: Instance,
        running: tuple[ir.OperatorIdentifier, ...],
    ) -> list[_Call]:
        """Replace one call of a function for one call of a module; return the calls in its body."""
        identifier, graph = call.op_identifier(), call.graph
        function = self._functions[identifier]
        if identifier in running or graph is None:
            raise ValueError(f"function {function.name!r} calls itself")
        self.counts[f"{function.domain}::{function.name}"] += 1
        body = function.graph.clone()
        inner: list[_Call] = []
        values: dict[str, ir.Value] = {}
        for shared, node in list(zip(function.all_nodes(), body.all_nodes(), strict=True)):
            for original, copy in zip(shared.outputs, node.outputs, strict=True):
                values[str(original.name)] = copy
            entry = entry_of(record, str(shared.name))
            restore(node, entry, self._expected.metadata(shared, instance))
            if node.op_identifier() in self._functions:
                place = self._expected.instance(shared, instance)
                inner.append((node, entry_of(entry, "inside"), place, (*running, identifier)))
            elif node.name:
                node.name = self._node_names.unused(node.name)
        self._put_in_place(body, call, graph)
        if self._inlined is not None:
            self._inlined.append(InlinedCall(identifier, values))
        return inner

    def _put_in_place(self, body: ir.Graph, call: ir.Node, graph: ir.Graph) -> None:
        """Insert the nodes of a copied body before a call, and remove the call."""
        returned = set(body.outputs)
        for value in all_values(body):
            if value.name and value not in returned and not value.is_graph_input():
                rename(value, self._value_names.unused(value.name))
        passed = (value and self._arguments.get(value, value) for value in call.inputs)
        arguments = dict(zip(body.inputs, passed, strict=False))
        replaced = {formal: arguments.get(formal) for formal in body.inputs}
        self._arguments |= replaced
        for node in dict.fromkeys(use.node for formal in body.inputs for use in formal.uses()):
            if node.op_identifier() not in self._functions:  # an inner call is replaced, too
                replace_inputs(node, replaced)
        nodes, results = list(body), list(body.outputs)
        body.outputs.clear()
        body.remove(nodes)
        graph.insert_before(call, nodes)
        for value, result in zip(results, call.outputs, strict=False):
            value.type, value.shape = result.type, result.shape
            value.metadata_props.clear()
            value.metadata_props.update(result.metadata_props)
            # Inner calls are recorded by the names of their results: the call keeps them.
            replace_uses(result, value, rest=result.name)
        unused: dict[ir.Value, ir.Value | None] = {}
        for read in call.inputs:
            if read is not None and read not in self._arguments:
                unused[read] = None
        replace_inputs(call, unused)
        graph.remove(call)


def _reorder(graph: ir.Graph, order: Sequence[int]) -> None:
    """Restore the order of the nodes, unless another tool changed the graph since."""
    nodes = list(graph)
    if sorted(order) != list(range(len(nodes))):
        return
    ordered = [node for _, node in sorted(zip(order, nodes, strict=True), key=lambda pair: pair[0])]
    placed: set[ir.Node] = set()
    for node in ordered:
        for value in reads_of(node):
            producer = value.producer()
            if producer is not None and producer.graph is graph and producer not in placed:
                return
        placed.add(node)
    graph.remove(nodes)
    graph.extend(ordered)


def _inline_others(model: ir.Model) -> dict[str, int]:
    """Inline functions that were in the exported model, or that another tool made."""
    if not model.functions:
        return {}
    called = {f"{domain}::{name}": 0 for domain, name, _ in model.functions}
    for node in all_nodes(model):
        metadata = node.metadata_props
        metadata.pop(_CALLER, None)  # an untrusted file may have the key
        if node.op_identifier() in model.functions:
            own = {key: metadata.pop(key) for key in tags.NODE_KEYS if key in metadata}
            metadata[_CALLER] = json.dumps(own)
            called[f"{node.domain}::{node.op_type}"] += 1
    try:
        InlinePass()(model)
    except (ValueError, ir.passes.PreconditionError) as error:
        raise InputError(
            f"model {model.graph.name!r}: its functions cannot be inlined: {error}"
        ) from error
    model.functions.clear()
    for node in all_nodes(model):
        caller = json.loads(node.metadata_props.pop(_CALLER, "{}"))
        give_tags_of_call(node, caller)
    return called
