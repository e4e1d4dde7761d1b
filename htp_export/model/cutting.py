"""Cutting: the part of a graph that computes one call of a module from its arguments in PyTorch.

A region has the nodes of a module. To run one call of it alone, its arguments become inputs, and
its dependences are resolved: constants are included, sizes that were read from another tensor are
read from the arguments, and all other tensors that are computed outside become inputs, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.signatures import Signature
from htp_export.model.regions import Region
from htp_export.model.tagged import TaggedModel
from htp_export.reporting.columns import many
from htp_export.shapes.operator_kinds import SIZES_ONLY


class _Walk(NamedTuple):
    """The result of a search from outputs back to their sources; see `Cutter.cut_nodes`."""

    nodes: set[ir.Node]
    entering: Mapping[ir.Value, None]
    comes_along: Callable[[ir.Value], bool]


@dataclass(frozen=True)
class Cut:
    """A part of the main graph: one call of a module, or a set of nodes; the model is not changed.

    Attributes:
        path: The module; for a set of nodes, the one around all of it.
        call: The number of the call.
        inputs: Name → tensor that enters: first the needed arguments of ``forward``, in order; then
            tensors that are computed outside, under their names in the file.
        outputs: Name → tensor that leaves, in the order in which ``forward`` returns them.
        nodes: The nodes that compute them, in order.
        initializers: The initializers that these read, also in subgraphs, without arguments.
        sizes: Constants, and values that depend only on sizes of inputs. They are computed outside,
            but ``size_nodes`` can compute them from the inputs.
        size_nodes: Nodes outside that compute ``sizes`` once their ``Shape`` nodes read inputs of
            the cut.
    """

    path: str
    call: int
    inputs: Mapping[str, ir.Value]
    outputs: Mapping[str, ir.Value]
    nodes: tuple[ir.Node, ...]
    initializers: tuple[ir.Value, ...]
    sizes: tuple[ir.Value, ...] = ()
    size_nodes: tuple[ir.Node, ...] = ()


class Cutter:
    """Cuts modules out of one model."""

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged
        self._index = tagged.index
        self._order = {node: place for place, node in enumerate(tagged.model.graph)}

    def cut(self, path: str, call: int = 0) -> Cut:
        """Cut one call of a module, counted from 0, out of the model.

        Raises:
            UnknownModuleError: If the model has no such module.
            InputError: If the module has no such call, or cannot be cut out; the message has the
                reason, and the module to cut instead.
            UntaggedModelError: If the model has no tags.
        """
        region = self._region(path, call)
        path = region.path
        members = frozenset(node for node in region.nodes if node in self._order)
        inputs, wanted = self._ends(region, path, call)
        walk = self._walk(wanted.values(), members, frozenset(inputs.values()), self.is_free)
        part = self._part(path, call, walk, inputs, wanted)
        if not part.nodes and not part.inputs:
            raise InputError(
                f"module {path!r} computes nothing from tensors of the model: it is constant"
            )
        return part

    def cut_nodes(
        self,
        members: Set[ir.Node],
        outputs: Mapping[str, ir.Value],
        comes_along: Callable[[ir.Value], bool] = lambda value: True,
        stops: Iterable[ir.Value] = (),
    ) -> Cut:
        """Cut a set of nodes of the main graph, as far as they compute some of its tensors.

        Args:
            members: The nodes.
            outputs: Name → tensor that they compute.
            comes_along: Whether a constant value is included where it is needed, as an initializer or
                with its nodes. Other constants are included if their node is a member; else they
                enter.
            stops: Values that enter even if a member computes them.
        """
        walk = self._walk(outputs.values(), members, frozenset(stops), comes_along)
        measuring = self._measuring_others(walk)
        if measuring:
            walk = self._walk(outputs.values(), members - measuring, frozenset(), comes_along)
        inputs = {str(value.name): value for value in walk.entering if not self.is_size(value)}
        return self._part("", 0, walk, inputs, outputs)

    def _walk(
        self,
        outputs: Iterable[ir.Value],
        members: Set[ir.Node],
        stops: frozenset[ir.Value],
        comes_along: Callable[[ir.Value], bool],
    ) -> _Walk:
        """Search from outputs back to constants, stops, and values that other nodes compute."""
        nodes, entering = set[ir.Node](), dict[ir.Value, None]()
        queue, seen = list(outputs), set[ir.Value]()
        while queue:
            value = queue.pop()
            if value in seen:
                continue
            seen.add(value)
            producer = value.producer()
            free = self.is_free(value) and comes_along(value)
            if value in stops or (not free and (producer is None or producer not in members)):
                entering[value] = None
            elif producer is not None and producer not in nodes:
                nodes.add(producer)
                queue.extend(self.reads(producer))
        return _Walk(nodes, entering, comes_along)

    def _measuring_others(self, walk: _Walk) -> set[ir.Node]:
        """``Shape`` nodes of a walk that are the only consumers of an input, and may read another one.

        An exporter reads a size from any input that has it, such as the length of the past from the
        cache of the last layer.
        """
        measured: dict[ir.Value, set[ir.Node]] = {}
        others: list[ir.Value] = []
        for value in walk.entering:
            nodes = self._measuring(value, walk)
            if nodes:
                measured[value] = nodes
            elif not self.is_size(value):
                others.append(value)
        found: set[ir.Node] = set()
        for nodes in measured.values():
            if all(same_dimensions(node, others) is not None for node in nodes):
                found |= nodes
        return found

    def _measuring(self, value: ir.Value, walk: _Walk) -> set[ir.Node]:
        """The ``Shape`` nodes of a walk that read an input of the model whose values others read.

        Empty if a node of the walk reads the values, too.
        """
        users = {use.node for use in value.uses()}
        here = {node for node in users if not walk.nodes.isdisjoint(self._index.scopes(node))}
        if not value.is_graph_input() or any(node.op_type != "Shape" for node in here):
            return set()
        return here if any(node.op_type not in SIZES_ONLY for node in users - here) else set()

    def _part(
        self,
        path: str,
        call: int,
        walk: _Walk,
        inputs: Mapping[str, ir.Value],
        wanted: Mapping[str, ir.Value],
    ) -> Cut:
        """The cut that a walk found; tensors that enter as sizes are computed from the inputs."""
        known = frozenset(inputs.values())
        needed = set(walk.entering)
        sizes, size_nodes = dict[ir.Value, None](), dict[ir.Node, None]()
        for value in walk.entering:
            if value in known:
                continue
            cone = self._size_cone(value, [*inputs.values()], walk.comes_along)
            if cone is not None:
                nodes_of_size, measured = cone
                sizes[value] = None
                size_nodes.update(dict.fromkeys(nodes_of_size))
                needed.update(measured)
        entering = {name: value for name, value in inputs.items() if value in needed}
        for value in walk.entering:
            if value not in sizes and value not in known:
                entering[str(value.name)] = value
        # Constants that both sides read are computed once, with the sizes.
        for node in size_nodes:
            if node in walk.nodes:
                sizes.update(dict.fromkeys(node.outputs))
        nodes = tuple(sorted(walk.nodes - size_nodes.keys(), key=self._order.__getitem__))
        ordered = tuple(sorted(size_nodes, key=self._order.__getitem__))
        read = (value for node in (*nodes, *ordered) for value in self.reads(node))
        arguments = set(entering.values())
        stored = filter(ir.Value.is_initializer, dict.fromkeys((*read, *wanted.values())))
        initializers = [value for value in stored if value not in arguments]
        return Cut(path, call, entering, wanted, nodes, tuple(initializers), tuple(sizes), ordered)

    def _region(self, path: str, call: int) -> Region:
        """The region of a module, with all its calls, if it can be cut out."""
        region = self._tagged[path]
        info = region.info
        if call and not 0 <= call < info.calls:
            raise InputError(
                f"module {path!r} has no call {call}: it ran {many(info.calls, 'time')}, counted from 0"
            )
        if info.fate.is_merged:
            others = ", ".join(repr(other) if other else "the root" for other in info.fused_with)
            around = self._whole_around(path)
            remedy = (
                f"take {around!r} instead"
                if around
                else "no module around it is whole; take a file that was not optimised, as "
                "htp_export.export(..., optimize=False) writes it in Python"
            )
            raise InputError(
                f"module {path!r} was fused with {others}: a tensor at its border is not in the file; "
                f"{remedy}"
            )
        if not region.nodes:
            reason = "the file gives it none" if info.fate.is_exact else info.fate.meaning
            raise InputError(f"module {path!r} has no nodes: {reason}")
        if not any(node in self._order for node in region.nodes):
            *_, holder = self._index.scopes(region.nodes[0])
            raise InputError(
                f"module {path!r} lies inside a branch, a loop body or a function; "
                f"take {tags.common_ancestor(self._tagged.owners_of(holder))!r} instead"
            )
        return region

    def _whole_around(self, path: str) -> str:
        """The innermost exact module around a module; the root without one."""
        above = (up for up in tags.ancestors(path) if up != path and up in self._tagged)
        return next((up for up in above if self._tagged.hierarchy[up].fate.is_exact), "")

    def _ends(
        self, region: Region, path: str, call: int
    ) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:
        """The inputs and outputs of a call, by its signature in the file, or else by the graph."""
        values, signature = self._tagged.values, self._tagged.signature(path, call)
        if not path:
            return self._inputs_of_model(signature), _named(self._tagged.results)
        call_region = region.call(call) if region.calls > 1 else region
        if signature is None:
            return _named(call_region.inputs), _named(call_region.outputs)
        inputs: dict[str, ir.Value] = {}
        for argument, name in signature.inputs.items():
            value = values.get(name) if name is not None else None
            if value is None or value in self._index.constant:
                continue
            if value not in inputs.values():
                inputs[argument] = value
        outputs = [name for name in signature.outputs if name is not None]
        if not outputs or any(name not in values for name in outputs):
            return inputs, _named(call_region.outputs)  # a tool renamed or removed them
        return inputs, {name: values[name] for name in outputs}

    def _inputs_of_model(self, signature: Signature | None) -> dict[str, ir.Value]:
        """The inputs of the model, under the names of ``forward``'s arguments if these are known."""
        arguments: dict[str | None, str] = {}
        if signature is not None:
            arguments = {name: argument for argument, name in signature.inputs.items()}
        inputs: dict[str, ir.Value] = {}
        for value in self._tagged.model.graph.inputs:
            if not value.is_initializer():
                inputs[arguments.get(value.name, str(value.name))] = value
        return inputs

    def reads(self, node: ir.Node) -> Iterator[ir.Value]:
        """The values of the main graph that a node and its subgraphs read."""
        return self._index.reads(node)

    def _size_cone(
        self, value: ir.Value, inputs: Sequence[ir.Value], comes_along: Callable[[ir.Value], bool]
    ) -> tuple[list[ir.Node], set[ir.Value]] | None:
        """The nodes that compute a value from sizes alone, and the inputs that have these sizes.

        None if a size is of no input.
        """
        # Many branches: one search, in which each kind of value is followed in its own way.
        if not self.is_size(value):
            return None
        cone: dict[ir.Node, None] = {}
        used: set[ir.Value] = set()
        queue = [value]
        while queue:
            current = queue.pop()
            if self.is_free(current) and not comes_along(current):
                return None
            node = current.producer()
            if node is None or node in cone:
                continue
            cone[node] = None
            source = node.inputs[0] if node.op_type in SIZES_ONLY else None
            if source is not None and source in inputs:
                used.add(source)
            elif node.op_type == "Shape" and not self.is_free(current):
                places = same_dimensions(node, inputs)
                if places is None:
                    return None
                used.update(place[0] for place in places if not isinstance(place, int))
            elif node.op_type == "Size":
                return None
            else:
                queue.extend(operand for operand in node.inputs if operand is not None)
        return list(cone), used

    def is_size(self, value: ir.Value) -> bool:
        """Whether a value depends on the model's inputs, but only on sizes of tensors."""
        return value in self._sizes

    @cached_property
    def _sizes(self) -> frozenset[ir.Value]:
        sizes: set[ir.Value] = set()
        for node in self._order:
            is_size = node.op_type in SIZES_ONLY
            if not is_size and node not in self._index.bodies:
                read = [value for value in node.inputs if value is not None]
                is_size = bool(read) and all(self.is_free(v) or v in sizes for v in read)
            if is_size:
                sizes.update(value for value in node.outputs if not self.is_free(value))
        return frozenset(sizes)

    def is_free(self, value: ir.Value) -> bool:
        """Whether a value is included where it is needed: initializers and constants."""
        return value.is_initializer() or value in self._index.constant


def check_outside(tagged: TaggedModel, names: Iterable[str | None]) -> None:
    """Refuse tensors that a part of a model needs and that no run of the whole model can return.

    Raises:
        InputError: If one of them is not in the main graph.
    """
    for name in names:
        if name not in tagged.values:
            raise InputError(f"it needs {name!r}, which is inside a branch, a loop or a function")


def same_dimensions(
    shape_node: ir.Node, inputs: Sequence[ir.Value]
) -> list[int | tuple[ir.Value, int]] | None:
    """For each dimension that a ``Shape`` node returns: its number, or an input and its axis.

    Dimensions with the same name are equal. None if a dimension is not among the inputs.
    """
    source = shape_node.inputs[0]
    if source is None or source.shape is None:
        return None
    start = shape_node.attributes.get_int("start", 0)
    end = shape_node.attributes.get_int("end", None)
    dimensions: list[int | tuple[ir.Value, int]] = []
    for dimension in list(source.shape)[start:end]:
        if isinstance(dimension, int):
            dimensions.append(dimension)
            continue
        place = _place_of(dimension, inputs)
        if place is None:
            return None
        dimensions.append(place)
    return dimensions


def _place_of(dimension: ir.SymbolicDim, inputs: Sequence[ir.Value]) -> tuple[ir.Value, int] | None:
    """The first input that has a named dimension, and its axis."""
    if dimension.value is None:
        return None
    for value in inputs:
        for axis, size in enumerate(value.shape or ()):
            if size == dimension:
                return value, axis
    return None


def _named(values: Iterable[ir.Value]) -> dict[str, ir.Value]:
    return {str(value.name): value for value in values}
