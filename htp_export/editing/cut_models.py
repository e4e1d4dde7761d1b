"""A cut as a model of its own: valid, small, and with the tags and the module tree of what is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance, NodeCalls, renumbered
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import lora_of_inputs, write_lora, write_model_metadata
from htp_export.format.signatures import Signature
from htp_export.format.tags import Reason
from htp_export.lineage.owner_rule import Owned
from htp_export.model.cutting import Cut, same_dimensions
from htp_export.model.regions import all_nodes, all_values
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import UsedNames, rename

_FIRST_SHAPE_WITH_RANGE = 15  # opset in which Shape got its attributes start and end


def cut_model(tagged: TaggedModel, part: Cut) -> ir.Model:
    """A stand-alone model of a cut; it shares the tensors of its weights with the whole model, and nothing else."""
    graph, renamed = cut_graph(tagged, part)
    model = model_around(tagged, graph)
    calls = _Calls(tagged, part)
    narrow_owners(tagged, model, calls.owners, calls.number, part.path, calls.tree)
    signatures = _signatures(tagged, calls.numbers, renamed)
    write_part_metadata(
        tagged, model, calls.hierarchy, calls.tree, signatures, calls.modules.__contains__
    )
    return model


def write_part_metadata(
    tagged: TaggedModel,
    model: ir.Model,
    hierarchy: Hierarchy,
    calls: CallTree,
    signatures: Mapping[str, Sequence[Signature]],
    inside: Callable[[str], bool],
) -> None:
    """Write into a part of a model what is known of its modules, as far as the whole says it.

    ``inside`` tells whether the parameters of a module are the part's; the rest is that of the
    part.
    """
    known = tagged.parameters
    write_model_metadata(
        model.metadata_props,
        hierarchy,
        calls=calls if tags.CALLERS in tagged.model.metadata_props else None,
        signatures=signatures,
        parameters=None if known is None else {path: known[path] for path in known if inside(path)},
    )
    inputs = {str(value.name) for value in model.graph.inputs}
    write_lora(model.metadata_props, lora_of_inputs(tagged.model.metadata_props, inputs))


def cut_graph(tagged: TaggedModel, part: Cut) -> tuple[ir.Graph, dict[str, str]]:
    """The graph of a cut, and what was renamed: name in the whole → name here; see `Cut.inputs` and `output_name`.

    Inputs with a default value, such as the factors of `lora.insert`, stay inputs with it.
    """
    model = tagged.model
    view = ir.GraphView(
        [*part.inputs.values(), *part.sizes],
        list(dict.fromkeys(part.outputs.values())),
        nodes=part.nodes,
        initializers=part.initializers,
        opset_imports=dict(model.graph.opset_imports),
        name=tagged.hierarchy[part.path].simple_class or model.graph.name,
    )
    graph = view.clone()
    optional = [
        graph.initializers[str(value.name)] for value in part.initializers if value.is_graph_input()
    ]
    for value in graph.inputs:
        value.const_value = None  # of a weight that is given, not held
    for value in (*graph.inputs, *graph.outputs):  # where the file did not say it
        known = (
            tagged.typed.get(str(value.name))
            if value.dtype is None or value.shape is None
            else None
        )
        if known is not None:
            value.type, value.shape = value.type or known.type, value.shape or known.shape
    _compute_sizes(graph, part)
    for place, value in enumerate(graph.outputs):
        if value.producer() is None:  # what is given back as it came, and what is constant
            graph.outputs[place] = own_output(graph, value, Owned((part.path,), Reason.FLOW))
    renamed = _name_inputs(graph, list(part.inputs))
    graph.inputs.extend(optional)
    return graph, renamed


def model_around(tagged: TaggedModel, graph: ir.Graph) -> ir.Model:
    """A model of a graph that was cut out: with the functions that it calls, and of the whole's versions."""
    source = tagged.model
    # a part is no ONNX model either
    way = {key: way for key, way in source.metadata_props.items() if key == tags.WAY}
    model = ir.Model(
        graph,
        ir_version=source.ir_version,
        producer_name=source.producer_name,
        producer_version=source.producer_version,
        functions=[function.clone() for function in source.functions.values()],
        metadata_props={tags.FORMAT: tags.VERSION, **way},
    )
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    return model


def output_name(value: ir.Value) -> str:
    """The name that a value of the whole has where it leaves a cut.

    It is its own, but for what no node makes: an initializer and an output cannot be one tensor.
    """
    return str(value.name) if value.producer() is not None else f"{value.name}.returned"


def own_output(graph: ir.Graph, value: ir.Value, owned: Owned) -> ir.Value:
    """Add a node of one module that returns an input or an initializer as a tensor of its own."""
    node = ir.node("Identity", [value])
    owned.write(node.metadata_props, owned.paths)
    new = node.outputs[0]
    new.name, new.type, new.shape = output_name(value), value.type, value.shape
    graph.append(node)
    return new


def _compute_sizes(graph: ir.Graph, part: Cut) -> None:
    """Put nodes that compute sizes from the inputs in the place of the inputs that stand for them."""
    count = len(part.inputs)
    counterparts = dict(zip((*part.inputs.values(), *part.sizes), graph.inputs, strict=True))
    by_name = {value.name: value for value in graph.initializers.values()}
    computed: dict[ir.Value, ir.Value] = {}
    nodes: list[ir.Node] = []
    sizes = (value for node in part.size_nodes for value in node.outputs)
    names = UsedNames(
        value.name for value in (*all_values(graph), *part.outputs.values(), *sizes) if value.name
    )
    for node in part.size_nodes:
        places = None
        if node.op_type == "Shape" and node.inputs[0] not in part.inputs.values():
            places = same_dimensions(node, list(part.inputs.values()))
        if places is not None:
            opset, name = graph.opset_imports.get("", 1), str(node.outputs[0].name)
            built = _read_dimensions(places, counterparts, opset, name, names)
            nodes.extend(built)
            result = [built[-1].outputs[0]]
        else:
            inputs = [
                None
                if value is None
                else computed.get(value) or counterparts.get(value) or by_name[value.name]
                for value in node.inputs
            ]
            copy = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                list(node.attributes.values()),
                num_outputs=len(node.outputs),
            )
            nodes.append(copy)
            result = list(copy.outputs)
        for old, new in zip(node.outputs, result, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            computed[old] = new
    for value in part.sizes:
        counterparts[value].replace_all_uses_with(computed[value], replace_graph_outputs=True)
    graph.inputs[count:] = []
    for node in nodes:
        Owned((part.path,), Reason.FLOW).write(node.metadata_props, {part.path})
    if nodes:
        first = next(iter(graph), None)
        graph.insert_before(first, nodes) if first is not None else graph.extend(nodes)


def _read_dimensions(
    places: Sequence[int | tuple[ir.Value, int]],
    counterparts: Mapping[ir.Value, ir.Value],
    opset: int,
    name: str,
    names: UsedNames,
) -> list[ir.Node]:
    """Nodes whose last one gives the dimensions as a vector of int64; names of tensors begin with ``name``."""
    nodes: list[ir.Node] = []
    for place in places:
        if isinstance(place, int):
            nodes.append(
                ir.node("Constant", [], {"value": ir.tensor(np.array([place], dtype=np.int64))})
            )
        elif opset >= _FIRST_SHAPE_WITH_RANGE:
            nodes.append(
                ir.node("Shape", [counterparts[place[0]]], {"start": place[1], "end": place[1] + 1})
            )
        else:
            shape = ir.node("Shape", [counterparts[place[0]]])
            axis = ir.node(
                "Constant", [], {"value": ir.tensor(np.array([place[1]], dtype=np.int64))}
            )
            nodes += [
                shape,
                axis,
                ir.node("Gather", [shape.outputs[0], axis.outputs[0]], {"axis": 0}),
            ]
            shape.outputs[0].name = names.unused(f"{name}.{len(nodes)}.shape")
            axis.outputs[0].name = names.unused(f"{name}.{len(nodes)}.axis")
        nodes[-1].outputs[0].name = names.unused(f"{name}.{len(nodes)}")
    ends = [
        node.outputs[0]
        for node in nodes
        if not any(node.outputs[0] in reader.inputs for reader in nodes)
    ]
    if len(ends) != 1:
        nodes.append(ir.node("Concat", ends, {"axis": 0}))
    return nodes


def _name_inputs(graph: ir.Graph, names: Sequence[str]) -> dict[str, str]:
    """Name the inputs after the arguments; what has such a name already gets another. Old name → new."""
    inputs, renamed = set(graph.inputs), {}
    taken = {value.name: value for value in all_values(graph) if value not in inputs}
    for name in names:
        holder = taken.get(name)
        if holder is not None:
            fresh = next(
                new for k in range(1, len(taken) + 2) if (new := f"{name}.{k}") not in taken
            )
            renamed[name] = fresh
            rename(holder, fresh)
            taken[fresh] = holder
    for value, name in zip(graph.inputs, names, strict=True):
        renamed[str(value.name)] = name
        rename(value, name)
    return renamed


class _Calls:
    """The calls in a cut, with the modules that ran in them, wherever these are registered.

    Attributes:
        modules: The modules in the cut: those below its module, and those that it called.
        numbers: Module path → the numbers that its calls in the cut have in the whole.
        hierarchy: The modules, and those above them.
        tree: Their calls.
    """

    def __init__(self, tagged: TaggedModel, part: Cut) -> None:
        tree, top = tagged.hierarchy, Instance(part.path, part.call)
        inside = tagged.calls.inside(top)
        self._path = part.path
        self.modules = {path for path in tree if path in inside or tags.is_under(path, part.path)}
        self.numbers = {path: inside[path] for path in tree if path in inside}
        above = tags.all_above(self.modules)
        self.hierarchy = Hierarchy(
            info.counted(len(inside.get(path, ())))
            if path in self.modules
            else ModuleInfo(path, info.class_name)
            for path, info in tree.items()
            if path in self.modules or path in above or not path
        )
        self._calls = {
            Instance(path, number): Instance(path, place)
            for path, numbers in self.numbers.items()
            for place, number in enumerate(numbers)
        }
        callers: dict[str, list[Instance | None]] = {}
        for path, numbers in self.numbers.items():
            callers_inside = [
                self._caller(tagged.calls, Instance(path, number), top) for number in numbers
            ]
            if all(caller is None or caller.call >= 0 for caller in callers_inside):
                callers[path] = callers_inside
        self.tree = CallTree(self.hierarchy, callers)

    def number(self, call: Instance) -> Instance | None:
        """What a call of the whole is in the cut."""
        return self._calls.get(call)

    def owners(self, work: NodeCalls) -> Iterator[str]:
        """The owners of a node that are in the cut; of modules registered elsewhere, those whose calls are in it."""
        doing = {call.path for call in work.calls if call in self._calls}
        return (
            owner for owner in work.owners if owner in doing or tags.is_under(owner, self._path)
        )

    def _caller(self, tree: CallTree, call: Instance, top: Instance) -> Instance | None:
        """The call in the cut that a call ran in."""
        if call == top:
            return None
        around = tree.chain(call)[1:]
        if any(
            caller.call < 0 for caller in around[: around.index(top) if top in around else None]
        ):
            return Instance(top.path, -1)
        return next((self._calls[caller] for caller in around if caller in self._calls), None)


def narrow_owners(
    tagged: TaggedModel,
    model: ir.Model,
    inside: Callable[[NodeCalls], Iterable[str]],
    number: Callable[[Instance], Instance | None],
    otherwise: str,
    calls: CallTree,
) -> None:
    """Take the owners that are not in a part off its nodes: modules outside share no node with it any more.

    ``inside`` gives those that are, and ``otherwise`` owns nodes without any. ``number`` gives what
    a call of the whole is among the ``calls`` of the part's modules.
    """
    called = tagged.hierarchy.called
    for node in all_nodes(model):
        metadata, work = node.metadata_props, tagged.work_of(node)
        owners = tuple(inside(work)) or (otherwise,)
        calls_now = calls.encode_calls(owners, renumbered(tagged.calls, work, number))
        if owners != work.owners:
            Owned(owners, metadata.get(tags.REASON, Reason.FLOW), calls_now).write(metadata, called)
        tags.write_calls(metadata, calls_now)


def _signatures(
    tagged: TaggedModel, numbers: Mapping[str, Sequence[int]], renamed: Mapping[str, str]
) -> dict[str, list[Signature]]:
    return {
        path: [
            signatures[number].renamed(lambda name: renamed.get(name, name))
            for number in numbers[path]
        ]
        for path, signatures in tagged.signatures.items()
        if path in numbers and len(signatures) == tagged.hierarchy[path].calls
    }
