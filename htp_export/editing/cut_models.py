"""A cut as a model of its own: valid, small, and with the tags and modules of its nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from htp_export.editing.edit import Edit
from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance, NodeCalls, renumbered
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import lora_of_inputs, write_lora
from htp_export.format.signatures import Signature
from htp_export.format.tags import Reason
from htp_export.lineage.tagging import Owned
from htp_export.model.cutting import Cut, same_dimensions
from htp_export.model.regions import all_nodes, all_values
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import UsedNames, rename

_FIRST_SHAPE_WITH_RANGE = 15  # opset in which Shape got its attributes start and end


def cut_model(tagged: TaggedModel, part: Cut) -> ir.Model:
    """Return a separate model of a cut; it shares only the tensors of weights with the whole."""
    calls = _Calls(tagged, part)
    edit, renamed = edit_of_cut(tagged, part)
    with edit:
        narrow_owners(edit, tagged, calls.owners, calls.number, part.path, calls.tree)
        edit.signatures = _signatures(tagged, calls.numbers, renamed)
        describe_part(edit, tagged, calls.hierarchy, calls.tree, calls.modules.__contains__)
    return edit.tagged.model


def describe_part(
    edit: Edit,
    tagged: TaggedModel,
    hierarchy: Hierarchy,
    calls: CallTree,
    inside: Callable[[str], bool],
) -> None:
    """Describe the modules of a part of a model, as far as the whole does.

    Args:
        edit: The part.
        tagged: The whole.
        hierarchy: The modules of the part.
        calls: Their calls.
        inside: Whether the parameters of a module belong to the part.
    """
    metadata = tagged.model.metadata_props
    edit.set_modules(hierarchy, calls if tags.CALLERS in metadata else None)
    if tagged.parameters is not None:
        edit.set_parameters({path: of for path, of in tagged.parameters.items() if inside(path)})
    inputs = {str(value.name) for value in edit.graph.inputs}
    write_lora(edit.tagged.model.metadata_props, lora_of_inputs(metadata, inputs))


def edit_of_cut(tagged: TaggedModel, part: Cut) -> tuple[Edit, dict[str, str]]:
    """Begin a model of a cut, and return its renamed tensors: name in the whole → name in the cut.

    Nodes have the owners, and the model has the modules, of the whole. It shares only the tensors
    of weights with it. See `Cut.inputs` and `output_name`. Inputs with a default value, such as the
    factors of `lora.insert`, stay inputs with it.
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
        value.const_value = None  # a weight may be an argument of the cut
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype is not None and value.shape is not None:
            continue
        known = tagged.typed.get(str(value.name))
        if known is not None:
            value.type, value.shape = value.type or known.type, value.shape or known.shape
    edit = Edit(TaggedModel(_model_around(tagged, graph), tagged.hierarchy, tagged.source))
    _compute_sizes(edit, part)
    owned = Owned((part.path,), Reason.FLOW)
    for place, value in enumerate(graph.outputs):
        if value.producer() is None:  # a returned input, or an initializer
            graph.outputs[place] = own_output(edit, graph, value, owned)
    renamed = _name_inputs(graph, list(part.inputs))
    graph.inputs.extend(optional)
    return edit, renamed


def _model_around(tagged: TaggedModel, graph: ir.Graph) -> ir.Model:
    """Return a model of a cut's graph, with the functions that it calls and the same versions."""
    source = tagged.model
    # A part of a graph that is not an ONNX model is none either, and keeps the mark of that. Nodes
    # keep the numbers of calibrations.
    lasting = (tags.WAY, tags.CALIBRATIONS)
    kept = {key: text for key, text in source.metadata_props.items() if key in lasting}
    model = ir.Model(
        graph,
        ir_version=source.ir_version,
        producer_name=source.producer_name,
        producer_version=source.producer_version,
        functions=[function.clone() for function in source.functions.values()],
        metadata_props={tags.FORMAT: tags.VERSION, **kept},
    )
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    return model


def output_name(value: ir.Value) -> str:
    """The name of a value of the whole as an output of a cut.

    It is its own name, except for an initializer or an input: these cannot be outputs themselves.
    """
    return str(value.name) if value.producer() is not None else f"{value.name}.returned"


def own_output(edit: Edit, graph: ir.Graph, value: ir.Value, owned: Owned) -> ir.Value:
    """Add a node of one module that returns an input or initializer as a tensor of its own."""
    node = ir.node("Identity", [value])
    edit.set_owners(node, owned)
    new = node.outputs[0]
    new.name, new.type, new.shape = output_name(value), value.type, value.shape
    graph.append(node)
    return new


def _compute_sizes(edit: Edit, part: Cut) -> None:
    """Replace the inputs of a cut that are sizes by nodes that compute them from the other inputs."""
    graph = edit.graph
    counterparts = dict(zip((*part.inputs.values(), *part.sizes), graph.inputs, strict=True))
    nodes, computed = _size_nodes(graph, part, counterparts)
    for value in part.sizes:
        counterparts[value].replace_all_uses_with(computed[value], replace_graph_outputs=True)
    graph.inputs[len(part.inputs) :] = []
    for node in nodes:
        edit.set_owners(node, Owned((part.path,), Reason.FLOW))
    if nodes:
        first = next(iter(graph), None)
        graph.insert_before(first, nodes) if first is not None else graph.extend(nodes)


def _size_nodes(
    graph: ir.Graph, part: Cut, counterparts: Mapping[ir.Value, ir.Value]
) -> tuple[list[ir.Node], dict[ir.Value, ir.Value]]:
    """Copies of a cut's size nodes that read its inputs, and size in the whole → size in the cut.

    ``counterparts``: Input of the cut in the whole → the same in ``graph``.
    """
    arguments = list(part.inputs.values())
    by_name = {value.name: value for value in graph.initializers.values()}
    sizes = [value for node in part.size_nodes for value in node.outputs]
    used = (*all_values(graph), *part.outputs.values(), *sizes)
    names = UsedNames(value.name for value in used if value.name)
    computed: dict[ir.Value, ir.Value] = {}

    def counterpart(value: ir.Value | None) -> ir.Value | None:
        if value is None:
            return None
        return computed.get(value) or counterparts.get(value) or by_name[value.name]

    nodes: list[ir.Node] = []
    for node in part.size_nodes:
        places = None
        if node.op_type == "Shape" and node.inputs[0] not in arguments:
            places = same_dimensions(node, arguments)
        if places is not None:
            opset, name = graph.opset_imports.get("", 1), str(node.outputs[0].name)
            built = _read_dimensions(places, counterparts, opset, name, names)
        else:
            attributes = list(node.attributes.values())
            inputs = [counterpart(value) for value in node.inputs]
            count = len(node.outputs)
            built = [ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=count)]
        nodes.extend(built)
        for old, new in zip(node.outputs, built[-1].outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            computed[old] = new
    return nodes, computed


def _read_dimensions(
    places: Sequence[int | tuple[ir.Value, int]],
    counterparts: Mapping[ir.Value, ir.Value],
    opset: int,
    name: str,
    names: UsedNames,
) -> list[ir.Node]:
    """Nodes, the last of which returns dimensions as a vector of int64.

    Args:
        places: The dimensions: numbers, or an input of the whole and an axis.
        counterparts: Input of the whole → input of the cut.
        opset: The version of ONNX's operators.
        name: The prefix of the names of tensors.
        names: The names in use.
    """
    nodes: list[ir.Node] = []
    parts: list[ir.Value] = []
    for place in places:
        if isinstance(place, int):
            nodes.append(_integer(place))
        elif opset >= _FIRST_SHAPE_WITH_RANGE:
            value, axis = place
            nodes.append(ir.node("Shape", [counterparts[value]], {"start": axis, "end": axis + 1}))
        else:
            value, axis = place
            shape, index = ir.node("Shape", [counterparts[value]]), _integer(axis)
            inputs = [shape.outputs[0], index.outputs[0]]
            nodes += [shape, index, ir.node("Gather", inputs, {"axis": 0})]
            shape.outputs[0].name = names.unused(f"{name}.{len(nodes)}.shape")
            index.outputs[0].name = names.unused(f"{name}.{len(nodes)}.axis")
        nodes[-1].outputs[0].name = names.unused(f"{name}.{len(nodes)}")
        parts.append(nodes[-1].outputs[0])
    if len(parts) != 1:
        nodes.append(ir.node("Concat", parts, {"axis": 0}))
    return nodes


def _integer(number: int) -> ir.Node:
    """A constant vector of one integer."""
    return ir.node("Constant", [], {"value": ir.tensor(np.array([number], dtype=np.int64))})


def _name_inputs(graph: ir.Graph, names: Sequence[str]) -> dict[str, str]:
    """Name the inputs after the arguments, and rename other tensors of these names; old name → new."""
    inputs, renamed = set(graph.inputs), {}
    others = {value.name: value for value in all_values(graph) if value not in inputs}
    for name in names:
        other = others.get(name)
        if other is None:
            continue
        numbered = (f"{name}.{number}" for number in itertools.count(1))
        unused = next(candidate for candidate in numbered if candidate not in others)
        renamed[name] = unused
        rename(other, unused)
        others[unused] = other
    for value, name in zip(graph.inputs, names, strict=True):
        renamed[str(value.name)] = name
        rename(value, name)
    return renamed


class _Calls:
    """The calls in a cut, with the modules that ran in them, wherever these are registered.

    Attributes:
        modules: The modules in the cut: the descendants of its module, and modules that it called.
        numbers: Module path → the numbers in the whole of its calls in the cut.
        hierarchy: The modules, and their ancestors.
        tree: Their calls.
    """

    def __init__(self, tagged: TaggedModel, part: Cut) -> None:
        tree, top = tagged.hierarchy, Instance(part.path, part.call)
        inside = tagged.calls.inside(top)
        self._path = part.path
        self.modules = {path for path in tree if path in inside or tags.is_under(path, part.path)}
        self.numbers = {path: inside[path] for path in tree if path in inside}
        above = tags.all_above(self.modules)
        infos: list[ModuleInfo] = []
        for path, info in tree.items():
            if path in self.modules:
                infos.append(info.counted(len(inside.get(path, ()))))
            elif path in above or not path:
                infos.append(ModuleInfo(path, info.class_name))
        self.hierarchy = Hierarchy(infos)
        # call in the whole → call in the cut
        self._calls: dict[Instance, Instance] = {}
        for path, numbers in self.numbers.items():
            for place, number in enumerate(numbers):
                self._calls[Instance(path, number)] = Instance(path, place)
        self.tree = CallTree(self.hierarchy, self._callers(tagged.calls, top))

    def _callers(self, tree: CallTree, top: Instance) -> dict[str, list[Instance | None]]:
        """Module path → the callers of its calls in the cut, for modules whose callers are known."""
        callers: dict[str, list[Instance | None]] = {}
        for path, numbers in self.numbers.items():
            inside = [self._caller(tree, Instance(path, number), top) for number in numbers]
            if all(caller is None or caller.call >= 0 for caller in inside):
                callers[path] = inside
        return callers

    def number(self, call: Instance) -> Instance | None:
        """The call in the cut of a call in the whole; None if it is not in the cut."""
        return self._calls.get(call)

    def owners(self, work: NodeCalls) -> Iterator[str]:
        """The owners of a node that are in the cut.

        Modules that are registered elsewhere are in it if their calls are.
        """
        running = {call.path for call in work.calls if call in self._calls}
        for owner in work.owners:
            if owner in running or tags.is_under(owner, self._path):
                yield owner

    def _caller(self, tree: CallTree, call: Instance, top: Instance) -> Instance | None:
        """The call in the cut in which a call ran; one of number -1 if it is unknown."""
        if call == top:
            return None
        around = tree.chain(call)[1:]
        up_to_top = around[: around.index(top)] if top in around else around
        if any(caller.call < 0 for caller in up_to_top):
            return Instance(top.path, -1)
        for caller in around:
            if caller in self._calls:
                return self._calls[caller]
        return None


def narrow_owners(
    edit: Edit,
    tagged: TaggedModel,
    inside: Callable[[NodeCalls], Iterable[str]],
    number: Callable[[Instance], Instance | None],
    otherwise: str,
    calls: CallTree,
) -> None:
    """Remove owners outside the part from the tags of its nodes.

    Args:
        edit: The part.
        tagged: The whole.
        inside: Returns the owners of a node that are in the part.
        number: Returns the call in the part of a call in the whole.
        otherwise: The owner of nodes without an owner in the part.
        calls: The calls of the part's modules.
    """
    for node in all_nodes(edit.tagged.model):
        work = tagged.work_of(node)
        owners = tuple(inside(work)) or (otherwise,)
        calls_now = calls.encode_calls(owners, renumbered(tagged.calls, work, number))
        if owners != work.owners:
            reason = node.metadata_props.get(tags.REASON, Reason.FLOW)
            edit.set_owners(node, Owned(owners, reason, calls_now))
        else:
            edit.set_calls(node, calls_now)


def _signatures(
    tagged: TaggedModel, numbers: Mapping[str, Sequence[int]], renamed: Mapping[str, str]
) -> dict[str, list[Signature]]:
    """The signatures of the calls in a cut, with renamed tensors."""
    inside: dict[str, list[Signature]] = {}
    for path, signatures in tagged.signatures.items():
        if path in numbers and len(signatures) == tagged.hierarchy[path].calls:
            calls = [signatures[number] for number in numbers[path]]
            inside[path] = [call.renamed(lambda name: renamed.get(name, name)) for call in calls]
    return inside
