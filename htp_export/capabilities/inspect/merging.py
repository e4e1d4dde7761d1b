"""Several graphs of one model as one: those of its parts, or those between graph breaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.parameters import ModuleParameters
from htp_export.shapes.operator_kinds import subgraphs


@dataclass(frozen=True)
class Piece:
    """One of the graphs, with tags; it is not changed. Names of its nodes and tensors begin with ``name`` in the whole.

    Its module paths are below ``prefix``. ``inputs``: name of one of its inputs → the piece before it that computes the
    tensor, and the tensor's name there. ``weights``: name of one of its inputs → the full name of the parameter or
    buffer that it is, and its values.
    """

    model: ir.Model
    name: str
    prefix: str = ""
    inputs: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    weights: Mapping[str, tuple[str, ir.TensorProtocol]] = field(default_factory=dict)


def merged(
    pieces: Sequence[Piece], hierarchy: Hierarchy, parameters: Mapping[str, ModuleParameters] | None = None
) -> ir.Model:
    """Put graphs side by side into one, and connect them where the result of one is an input of another.

    Nodes keep their owners. In which call of a module they ran is left out, as each graph counts calls for itself. The
    graphs come in the order in which they run; ``hierarchy`` is the module tree of the whole, with the calls.
    """
    whole = _Whole(hierarchy)
    for piece in pieces:
        whole.add(piece)
    return whole.model(parameters)


class _Whole:
    def __init__(self, hierarchy: Hierarchy) -> None:
        self._known = dict(hierarchy)
        self._called = hierarchy.called
        self._nodes: list[ir.Node] = []
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._initializers: dict[str, ir.Value] = {}
        self._opsets: dict[str, int] = {}
        self._made: list[dict[str, ir.Value]] = []  # for each piece: name of a tensor in it → the tensor

    def add(self, piece: Piece) -> None:
        copy = piece.model.clone()
        graph = copy.graph
        self._opsets = {**graph.opset_imports, **self._opsets}
        nodes, inputs, outputs = list(graph), list(graph.inputs), list(graph.outputs)
        initializers = dict(graph.initializers)
        named = {str(value.name): value for node in nodes for value in node.outputs if value.name}
        self._made.append(named)
        graph.outputs.clear()
        graph.inputs.clear()
        graph.initializers.clear()
        graph.remove(nodes)
        for value in inputs:
            self._take(value, piece)
        for name, value in initializers.items():
            self._hold(tags.below(piece.prefix, name), value)
        for node in nodes:
            self._own(node, piece)
        self._nodes += nodes
        self._outputs += [value for value in outputs if value.producer() is not None]
        self._know(copy, piece.prefix)

    def _take(self, value: ir.Value, piece: Piece) -> None:
        """An input of a piece: what a piece before it computed, a weight, or an input of the whole."""
        if str(value.name) in piece.weights:
            full, value.const_value = piece.weights[str(value.name)]
            self._hold(full, value)
            return
        source = piece.inputs.get(str(value.name))
        made = None if source is None else self._made[source[0]].get(source[1])
        if made is not None:
            value.replace_all_uses_with(made)
            return
        value.name = f"{piece.name}/{value.name}"
        self._inputs.append(value)

    def _hold(self, name: str, value: ir.Value) -> None:
        """A weight; pieces that read the same one share it."""
        held = self._initializers.get(name)
        if held is not None:
            value.replace_all_uses_with(held)
            return
        value.name = name
        self._initializers[name] = value

    def _own(self, node: ir.Node, piece: Piece) -> None:
        node.name = f"{piece.name}/{node.name}"
        for value in node.outputs:
            if value.name:
                value.name = f"{piece.name}/{value.name}"
        owners = [tags.below(piece.prefix, path) for path in tags.owners_of(node.metadata_props)]
        if owners:
            reason = node.metadata_props.get(tags.REASON, "")
            tags.tag_node(node.metadata_props, tags.node_tags(owners, reason, self._called))
        for body in subgraphs(node):
            for value in body.inputs:
                value.name = f"{piece.name}/{value.name}"
            for inner in body:
                self._own(inner, piece)

    def _know(self, model: ir.Model, prefix: str) -> None:
        """What became of the modules of a part."""
        if not prefix or tags.MODULES not in model.metadata_props:
            return
        for path, info in Hierarchy.from_json(model.metadata_props[tags.MODULES]).items():
            full = tags.below(prefix, path)
            partners = tuple(tags.below(prefix, partner) for partner in info.fused_with)
            before = self._known.get(full, ModuleInfo(full, info.class_name, info.calls))
            self._known[full] = replace(before, fate=info.fate, fused_with=partners)

    def model(self, parameters: Mapping[str, ModuleParameters] | None) -> ir.Model:
        graph = ir.Graph(
            self._inputs,
            list(dict.fromkeys(self._outputs)),
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports=self._opsets,
        )
        model = ir.Model(graph, ir_version=10, producer_name="torch")
        write_model_metadata(model.metadata_props, Hierarchy(self._known.values()), parameters=parameters)
        graph.name = self._known[""].simple_class
        return model
