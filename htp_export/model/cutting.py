"""Cutting: the part of a graph that computes one call of a module from what PyTorch gave it.

A region says which nodes are a module's. To run it alone, one call is taken, its arguments become
inputs, and what it needs besides is found: constants come along, sizes that were read from some
tensor far away are read from the arguments instead, and whatever else was computed outside becomes
an input too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.regions import Region
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import SIZES_ONLY


class _Walk(NamedTuple):
    """What a way back from outputs to where the values come from met; see `Cutter.cut_nodes`."""

    nodes: set[ir.Node]
    entering: Mapping[ir.Value, None]
    comes_along: Callable[[ir.Value], bool]


@dataclass(frozen=True)
class Cut:
    """A part of the main graph: one call of a module, or a set of nodes; nothing of the model is copied or changed.

    Attributes:
        path: The module; for a set of nodes, the one above all of it.
        call: Which call of it.
        inputs: Tensors that enter, under their names: arguments of ``forward`` first, in order, as
            far as they are needed; then, under the names they have in the file, those that were
            computed outside.
        outputs: Tensors that leave, by name, in the order in which ``forward`` returns them.
        nodes: The nodes that compute them, in order.
        initializers: The initializers that these read, also in subgraphs, and that are no
            arguments.
        sizes: Values that nodes read and that only depend on sizes of inputs, if on anything: they
            are computed outside, but can be computed from the inputs by ``size_nodes``.
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
            InputError: If the module has no such call, or cannot be cut out: the message says why,
                and what to cut.
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
        """Cut a set of nodes of the main graph out, as far as they compute some of its tensors.

        Args:
            members: The nodes.
            outputs: What they are to give, by name.
            comes_along: Whether a constant value, an initializer or what is made of such, is taken
                into the cut by whoever needs it. The others are taken where their node is a member,
                and else they enter.
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
        """The ``Shape`` nodes of a walk that read an input of the model for its sizes alone, and may read another one.

        An exporter reads a size from any input that has it, such as the length of the past from the
        last layer's cache.
        """
        measured = {
            value: nodes for value in walk.entering if (nodes := self._measuring(value, walk))
        }
        others = [
            value for value in walk.entering if value not in measured and not self.is_size(value)
        ]
        found: set[ir.Node] = set()
        for nodes in measured.values():
            if all(same_dimensions(node, others) is not None for node in nodes):
                found |= nodes
        return found

    def _measuring(self, value: ir.Value, walk: _Walk) -> set[ir.Node]:
        """The nodes of a walk that read a value, if all are ``Shape`` and other nodes read the values of this input."""
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
        known = frozenset(inputs.values())
        needed, sizes, size_nodes = (
            set(walk.entering),
            dict[ir.Value, None](),
            dict[ir.Node, None](),
        )
        for value in walk.entering:
            if value not in known:
                cone = self._size_cone(value, [*inputs.values()], walk.comes_along)
                if cone is not None:
                    sizes[value] = None
                    size_nodes.update(dict.fromkeys(cone[0]))
                    needed.update(cone[1])
        reached = {name: value for name, value in inputs.items() if value in needed}
        outside = (value for value in walk.entering if value not in sizes and value not in known)
        reached.update((str(value.name), value) for value in outside)
        # constants, read on both sides; they are made once
        both = [node for node in size_nodes if node in walk.nodes]
        sizes.update(dict.fromkeys(value for node in both for value in node.outputs))
        nodes = tuple(sorted(walk.nodes - size_nodes.keys(), key=self._order.__getitem__))
        ordered = tuple(sorted(size_nodes, key=self._order.__getitem__))
        read = (value for node in (*nodes, *ordered) for value in self.reads(node))
        entering = set(reached.values())
        initializers = (
            v
            for v in dict.fromkeys((*read, *wanted.values()))
            if v.is_initializer() and v not in entering
        )
        return Cut(path, call, reached, wanted, nodes, tuple(initializers), tuple(sizes), ordered)

    def _region(self, path: str, call: int) -> Region:
        """The module's region, all calls together, once it is certain that it can be cut."""
        region = self._tagged[path]
        info = region.info
        if call and not 0 <= call < info.calls:
            raise InputError(
                f"module {path!r} has no call {call}: it ran {info.calls} times, counted from 0"
            )
        if info.fate.is_merged:
            others = ", ".join(map(repr, info.fused_with))
            raise InputError(
                f"module {path!r} was fused with {others}: a tensor at its border is not in the file; "
                f"take {self._whole_around(path)!r} instead"
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
        above = (up for up in tags.ancestors(path) if up != path and up in self._tagged)
        return next((up for up in above if self._tagged.hierarchy[up].fate.is_exact), "")

    def _ends(
        self, region: Region, path: str, call: int
    ) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:
        """The tensors that the call was given and that it gave back, as the file tells or as the graph shows."""
        graph = self._tagged.model.graph
        values, signature = self._tagged.values, self._tagged.signature(path, call)
        if not path:
            names = (
                {name: argument for argument, name in signature.inputs.items()} if signature else {}
            )
            free = (value for value in graph.inputs if not value.is_initializer())
            return {names.get(value.name, str(value.name)): value for value in free}, _named(
                self._tagged.results
            )
        call_region = region.call(call) if region.calls > 1 else region
        if signature is None:
            return _named(call_region.inputs), _named(call_region.outputs)
        inputs: dict[str, ir.Value] = {}
        for argument, name in signature.inputs.items():
            value = values.get(name) if name is not None else None
            if (
                value is not None
                and value not in inputs.values()
                and value not in self._index.constant
            ):
                inputs[argument] = value
        known = [name for name in signature.outputs if name is not None]
        if not known or any(name not in values for name in known):  # a tool renamed or removed them
            return inputs, _named(call_region.outputs)
        return inputs, {name: values[name] for name in known}

    def reads(self, node: ir.Node) -> Iterator[ir.Value]:
        """What a node reads of the main graph, in its subgraphs too."""
        return self._index.reads(node)

    def _size_cone(
        self, value: ir.Value, inputs: Sequence[ir.Value], comes_along: Callable[[ir.Value], bool]
    ) -> tuple[list[ir.Node], set[ir.Value]] | None:
        """The nodes that compute a value from sizes alone, and which of ``inputs`` have these sizes, if any do."""
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
        """Whether a value depends on the model's inputs, and that through sizes of tensors alone."""
        return value in self._sizes

    @cached_property
    def _sizes(self) -> frozenset[ir.Value]:
        sizes: set[ir.Value] = set()
        for node in self._order:
            read = [value for value in node.inputs if value is not None]
            computed = bool(read) and node not in self._index.bodies
            if node.op_type in SIZES_ONLY or (
                computed and all(self.is_free(v) or v in sizes for v in read)
            ):
                sizes.update(value for value in node.outputs if not self.is_free(value))
        return frozenset(sizes)

    def is_free(self, value: ir.Value) -> bool:
        """Whether a value comes along with whatever needs it: an initializer, or made of constants."""
        return value.is_initializer() or value in self._index.constant


def check_outside(tagged: TaggedModel, names: Iterable[str | None]) -> None:
    """Refuse tensors that a part of a model needs and that no run of the whole gives.

    Raises:
        InputError: If one of them is not in the main graph.
    """
    for name in names:
        if name not in tagged.values:
            raise InputError(f"it needs {name!r}, which is inside a branch, a loop or a function")


def same_dimensions(
    shape_node: ir.Node, inputs: Sequence[ir.Value]
) -> list[int | tuple[ir.Value, int]] | None:
    """For each dimension that a ``Shape`` node gives, the number that it is, or an input and which of its dimensions.

    Dimensions are the same where the file gives them the same name. None if one of them is nowhere
    among the inputs.
    """
    source = shape_node.inputs[0]
    if source is None or source.shape is None:
        return None
    start, end = (
        shape_node.attributes.get_int("start", 0),
        shape_node.attributes.get_int("end", None),
    )
    dimensions: list[int | tuple[ir.Value, int]] = []
    for dimension in list(source.shape)[start:end]:
        if isinstance(dimension, int):
            dimensions.append(dimension)
            continue
        places = (
            (value, axis)
            for value in inputs
            if value.shape is not None
            for axis, size in enumerate(value.shape)
            if dimension.value is not None and size == dimension
        )
        place = next(places, None)
        if place is None:
            return None
        dimensions.append(place)
    return dimensions


def _named(values: Iterable[ir.Value]) -> dict[str, ir.Value]:
    return {str(value.name): value for value in values}
