"""`nodes`: a map from nodes to their modules and parameters, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from htp_export.capabilities.nodes.entries import (
    InitializerUse,
    MappedInitializer,
    MappedModule,
    MappedNode,
    MappedParameter,
    ParameterUse,
)
from htp_export.capabilities.nodes.finding import Uncomputed
from htp_export.capabilities.nodes.map_result import ModelMap
from htp_export.format import tags
from htp_export.format.torch_metadata import source_lines, source_of
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import dtype_name, stored_tensor
from htp_export.model.regions import name_of_node
from htp_export.model.tagged import ModelSource, TaggedModel, load
from htp_export.model.tensor_names import UsedNames
from htp_export.shapes.operator_kinds import operator_of
from htp_export.weights.parameter_places import (
    ParameterPlaces,
    WeightSource,
    WeightSources,
    owners_within,
)


@names_model_faults("model")
def nodes(model: ModelSource, select: str | Sequence[str] | None = None) -> ModelMap:
    """Map the nodes, modules, parameters and initializers of a model to each other.

    The modules of nodes are in their tags. The file lists PyTorch's parameters of each module, and
    the parameters of which each initializer consists, see ``docs/nodes.md``. Weights are not
    loaded.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        select: Only these modules and their descendants, with their nodes, parameters and weights.

    Returns:
        The map: ``.nodes``, ``.modules[path]``, ``.parameters[name]``, ``.initializers[name]``, and
        indexed by the name of a node or of a tensor, or by the index of a node in the graph.

    Raises:
        FileError: The file cannot be read.
        InputError: The model has invalid tags.
        SelectorError: The selector is invalid, or a part of it matches no module.
        UntaggedModelError: The model has no tags.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> mapped = htp_export.nodes(htp_export.export(net, (torch.randn(2, 5, 4),), verbose=False))
        >>> [(node.operator, node.modules, [str(use) for use in node.parameters]) for node in mapped.nodes]
        [('MatMul', ('0',), ['0.weight (transposed)']), ('Add', ('0',), ['0.bias']), ('Relu', ('1',), [])]
        >>> [node.operator for node in mapped.parameters["0.weight"].nodes]
        ['MatMul']
        >>> mapped["node_relu"].modules, mapped[0].operator
        (('1',), 'MatMul')
    """
    tagged = load(model)
    tagged.require_tags()
    return _Mapper(tagged, None if select is None else tagged.select(select)).result()


class _Mapper:
    """Maps nodes, modules, parameters and initializers; with a selection, only its part of them."""

    def __init__(self, tagged: TaggedModel, selected: Sequence[str] | None) -> None:
        self._tagged = tagged
        self._all = selected is None
        roots = set(selected or ())
        self._chosen: dict[str, None] = {}
        for path in tagged:
            if self._all or not roots.isdisjoint(tags.ancestors(path)):
                self._chosen[path] = None
        self._sources = WeightSources(tagged)
        self._places = ParameterPlaces(tagged, self._sources)
        unique = UsedNames()
        self._names = {
            value: unique.unused(value.name or "unnamed") for value in self._places.places
        }
        self._functions: dict[ir.Graph, str] = {}
        self._indices: dict[ir.Node, int] = {}
        # the function that contains a node, also in branches and loop bodies
        self._function_of: dict[ir.Node, str] = {}
        for function in tagged.model.functions.values():
            name = "::".join(function.identifier()[:2])
            self._functions[function.graph] = name
            self._function_of.update(dict.fromkeys(function.all_nodes(), name))
        numbers: defaultdict[object, int] = defaultdict(int)
        for node in tagged.nodes:
            self._indices[node] = numbers[node.graph]
            numbers[node.graph] += 1

    def result(self) -> ModelMap:
        """Map the selected nodes first; the other tables list the nodes of each entry."""
        nodes = {node: self._node(node) for node in self._tagged.nodes if self._is_chosen(node)}
        of_module: defaultdict[str, list[MappedNode]] = defaultdict(list)
        of_parameter: defaultdict[str, list[MappedNode]] = defaultdict(list)
        of_weight: defaultdict[ir.Value, list[MappedNode]] = defaultdict(list)
        for node, mapped in nodes.items():
            for module in mapped.modules:
                of_module[module].append(mapped)
            for weight in dict.fromkeys(source.tensor for source in self._read_by(node)):
                of_weight[weight].append(mapped)
            # Tied parameters are mapped under the name of the first.
            parameters = [self._places.declared[use.name].first for use in mapped.parameters]
            for parameter in dict.fromkeys(parameters):
                of_parameter[parameter].append(mapped)
        initializers = {}
        for value, name in self._names.items():
            if self._all or of_weight[value]:
                initializers[name] = self._initializer(value, name, of_weight[value])
        return ModelMap(
            nodes=tuple(nodes.values()),
            modules={path: self._module(path, of_module[path]) for path in self._chosen},
            parameters=self._parameters(of_parameter),
            initializers=initializers,
            from_pytorch=self._tagged.parameters is not None,
            tags=self._tagged.tag_facts,
            outputs=tuple(str(value.name) for value in self._tagged.model.graph.outputs),
            uncomputed=self._uncomputed(),
        )

    def _uncomputed(self) -> dict[tuple[str, str], Uncomputed]:
        """Function, or ``""`` for the graph, and tensor → kind, of tensors that no node computes."""
        model = self._tagged.model
        found: dict[tuple[str, str], Uncomputed] = {}
        found.update({("", str(value.name)): "model input" for value in model.graph.inputs})
        # an initializer that is an input, too, is a default
        found.update({("", name): "stored" for name in model.graph.initializers})
        for function in model.functions.values():
            scope = self._functions[function.graph]
            found.update({(scope, str(value.name)): "input" for value in function.inputs})
        for node, bodies in self._tagged.index.bodies.items():
            scope = self._function_of.get(node, "")
            for body in bodies:
                found.update({(scope, str(value.name)): "input" for value in body.inputs})
                found.update({(scope, name): "stored" for name in body.initializers})
        return found

    def _is_chosen(self, node: ir.Node) -> bool:
        work = self._tagged.index.works[node]
        return self._all or not {*work.owners, *work.modules}.isdisjoint(self._chosen)

    def _read_by(self, node: ir.Node) -> Iterator[WeightSource]:
        """The weights that a node uses; none for a call of a function, whose nodes use them."""
        if self._sources.calls_function(node):
            return
        for _, source in self._sources.read_by(node):
            if source.tensor in self._names:
                yield source

    def _node(self, node: ir.Node) -> MappedNode:
        """The entry of a node."""
        work = self._tagged.index.works[node]
        hierarchy = self._tagged.hierarchy
        calls: defaultdict[str, tuple[int, ...]] = defaultdict(tuple)
        for path, number in work.calls:
            if hierarchy[path].calls > 1:
                calls[path] += (number,)
        return MappedNode(
            name=name_of_node(node),
            operator=operator_of(node),
            modules=work.owners,
            calls=dict(calls),
            reason=node.metadata_props.get(tags.REASON, "") if self._tagged.source == "htp" else "",
            parameters=tuple(dict.fromkeys(self._uses(node, work.owners))),
            inputs=tuple("" if value is None else value.name or "" for value in node.inputs),
            outputs=tuple(value.name or "" for value in node.outputs),
            inside=self._inside(node),
            index=self._indices[node],
            function=self._function_of.get(node, ""),
            line=source_of(node),
            stack=source_lines(node),
        )

    def _inside(self, node: ir.Node) -> str:
        """The function or node that contains a node; empty for the main graph."""
        if node.graph is None or node.graph is self._tagged.model.graph:
            return ""
        holders = self._tagged.index.holders(node.graph)
        return self._functions.get(node.graph) or (name_of_node(holders[0]) if holders else "")

    def _uses(self, node: ir.Node, owners: Sequence[str]) -> Iterator[ParameterUse]:
        """The parameters in the weights that a node uses, as its owners use them."""
        for source in self._read_by(node):
            readers = owners_within(owners, source.within)
            for place in self._places.read_in(source.tensor, readers):
                name = self._places.name_in(place.parameter, readers)
                yield ParameterUse(name, self._names[source.tensor], (*place.how, *source.how))

    def _module(self, path: str, nodes: Sequence[MappedNode]) -> MappedModule:
        info = self._tagged.hierarchy[path]
        own = (self._tagged.parameters or {}).get(path)
        names = () if own is None else tuple(tags.below(path, name) for name in own.shapes)
        return MappedModule(path, info.class_name, info.calls, info.fate, tuple(nodes), names)

    def _parameters(self, nodes: Mapping[str, Sequence[MappedNode]]) -> dict[str, MappedParameter]:
        """Name → parameter; parameters outside the selection only if a selected node uses them."""
        uses: defaultdict[str, list[InitializerUse]] = defaultdict(list)
        for value, places in self._places.places.items():
            for place in places:
                uses[place.parameter].append(InitializerUse(self._names[value], place.how))
        parameters = {}
        for name, declared in self._places.declared.items():
            users = tuple(nodes.get(declared.first, ()))
            if self._all or users or declared.module in self._chosen:
                parameters[name] = MappedParameter(
                    name=name,
                    module=declared.module,
                    shape=declared.shape,
                    tied=declared.tied,
                    initializers=tuple(uses[declared.first]),
                    nodes=users,
                )
        return parameters

    def _initializer(
        self, value: ir.Value, name: str, nodes: Sequence[MappedNode]
    ) -> MappedInitializer:
        """The entry of a weight."""
        tensor = stored_tensor(value)
        assert tensor is not None
        owners = [owner for node in nodes for owner in node.modules]
        parameters = tuple(
            ParameterUse(self._places.name_in(place.parameter, owners), name, place.how)
            for place in self._places.places[value]
        )
        shape = tuple(tensor.shape.numpy())
        dtype = dtype_name(tensor.dtype)
        return MappedInitializer(name, shape, dtype, parameters, tuple(nodes))
