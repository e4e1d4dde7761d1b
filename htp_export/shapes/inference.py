"""The walk over a graph that infers shapes, element types and small contents: in order, into bodies and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir

from htp_export.shapes.known import (
    Dims,
    Fact,
    Known,
    Operation,
    constant_tensor,
    objects,
    small_array,
    small_contents,
)
from htp_export.shapes.operator_kinds import CONTROL_FLOW
from htp_export.shapes.operators import rules_of
from htp_export.shapes.schemas import evaluated, inferred, type_source
from htp_export.shapes.sizes import Dim

_MOST_TRIPS = 2**31
"""A loop that only its condition ends has a trip count of so much or more, which says nothing of its results."""


class Inference(Known):
    """Infers shapes while it walks over a graph.

    A subclass may look at every node that is visited, by overriding `visit`, `body` and `call`.
    ``sizes`` are those of open dimensions that are to be numbers.
    """

    def __init__(
        self,
        opsets: Mapping[str, int],
        functions: Mapping[ir.OperatorIdentifier, ir.Function] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(sizes)
        self._opsets = dict(opsets)
        self._functions = functions or {}
        self._calling: list[ir.Function] = []
        self._attributes: Mapping[str, ir.Attr] = {}
        self._depth = 0
        self._visits = 0

    def walk(self, graph: ir.Graph | ir.Function) -> None:
        """Visit the nodes of a graph in order."""
        for node in graph:
            self.visit(node)

    def visit(self, node: ir.Node) -> None:
        """Find out what a node makes, of what is known of its inputs."""
        operation = self.operation(node) if self._calling else node
        self._visits += self._depth > 0
        function = self._functions.get(node.op_identifier()) if self._functions else None
        if self._visits > _MOST_VISITS and (
            function is not None or operation.op_type in CONTROL_FLOW
        ):
            self._conclude(operation, ())
        elif function is not None and function not in self._calling:
            self.call(function, operation)
        elif operation.domain == "" and (
            operation.op_type in CONTROL_FLOW or operation.op_type == "SequenceMap"
        ):
            self._control_flow(operation)
        elif operation.op_type == "Constant" and operation.domain == "":
            self._constant(operation)
        else:
            self._infer(operation)

    def operation(self, node: ir.Node) -> Operation:
        """A node with its attributes; in a function's body, with those that the call gives it."""
        if not any(attribute.is_ref() for attribute in node.attributes.values()):
            return node
        resolved = []
        for name, attribute in node.attributes.items():
            if not attribute.is_ref():
                resolved.append(attribute)
            elif attribute.ref_attr_name in self._attributes:
                resolved.append(
                    ir.Attr(
                        name, attribute.type, self._attributes[str(attribute.ref_attr_name)].value
                    )
                )
        return _Called(node, ir.Node(node.domain, node.op_type, (), resolved))

    def call(self, function: ir.Function, operation: Operation) -> None:
        """Walk over the body of a function with what a call gives it."""
        saved = self._attributes, self._opsets, self._in_function
        arguments = [self.fact(value) for value in operation.inputs]
        written = {name: a for name, a in function.attributes.items() if a.value is not None}
        self._attributes = {**written, **operation.attributes}
        self._opsets = {**self._opsets, **function.opset_imports}
        self._calling.append(function)
        self._in_function = True
        self._calls += 1
        for place, formal in enumerate(function.inputs):
            self.state(formal, (arguments[place] if place < len(arguments) else None) or Fact())
        self._depth += 1
        self.walk(function)
        self._depth -= 1
        results = [self.fact(value) or Fact() for value in function.outputs]
        self._calling.pop()
        self._attributes, self._opsets, self._in_function = saved
        self._conclude(operation, results)

    def body(
        self, name: str, graph: ir.Graph, inputs: Sequence[Fact], times: int | None
    ) -> list[Fact]:
        """Walk over the subgraph of an attribute, which runs so many times if that is known; what it gives back."""
        for value, fact in zip(graph.inputs, inputs, strict=False):
            self.state(value, fact)
        self._depth += 1
        self.walk(graph)
        self._depth -= 1
        return [self.fact(value) or Fact() for value in graph.outputs]

    def either(self, first: Fact, second: Fact) -> Fact:
        """What is true of two tensors, as those that two branches give."""
        kind = first.type if first.type == second.type else None
        shape = None
        if (
            first.shape is not None
            and second.shape is not None
            and len(first.shape) == len(second.shape)
        ):
            shape = tuple(
                a if a == b else None for a, b in zip(first.shape, second.shape, strict=True)
            )
        if (
            first.contents is None
            or second.contents is None
            or first.contents.shape != second.contents.shape
        ):
            return Fact(kind, shape)
        same = all(
            a == b
            for a, b in zip(first.contents.reshape(-1), second.contents.reshape(-1), strict=True)
        )
        return Fact(kind, shape, first.contents if same else None)

    def repeat(self, state: list[Fact], run: Callable[[list[Fact]], list[Fact]]) -> list[Fact]:
        """What is true of the state of a loop before each run of its body, and after the last one."""
        while True:  # each round forgets at least one dimension
            after = run(state)
            common = [
                self.either(b, a).forgetting_values() for b, a in zip(state, after, strict=False)
            ]
            if all(
                b.shape == c.shape and b.type == c.type for b, c in zip(state, common, strict=False)
            ):
                return common
            state = common

    def trips(self, trips: Dim | None, certain: bool) -> Dim | None:
        """How often the body of a loop runs: as often as it may, if it is certain that nothing ends it before."""
        return trips if certain else None

    def _if(self, operation: Operation) -> list[Fact]:
        decided = self.constant(operation.inputs[0])
        taken = (
            ("then_branch", "else_branch")
            if decided is None
            else ("then_branch" if decided[0] else "else_branch",)
        )
        results = [self.body(name, operation.attributes[name].as_graph(), (), 1) for name in taken]
        if len(results) == 1:
            return results[0]
        return [self.either(first, second) for first, second in zip(*results, strict=True)]

    def _loop(self, operation: Operation) -> list[Fact]:
        graph = operation.attributes["body"].as_graph()
        most, condition, *_ = (*operation.inputs, None, None)  # both may be left out
        count, goes_on = self.contents(most), self.constant(condition)
        trips: Dim | None = None if count is None else count.reshape(-1)[0]
        if goes_on is not None and not all(goes_on):
            trips = 0
        elif isinstance(trips, int) and not 0 <= trips < _MOST_TRIPS:
            trips = None
        counter = Fact(ir.TensorType(ir.DataType.INT64), ())
        runs = Fact(ir.TensorType(ir.DataType.BOOL), (), objects(True))
        state = [_forgetful(self.fact(value)) for value in operation.inputs[2:]]
        state, results = self._runs(graph, lambda state: (counter, runs, *state), state, 1, trips)
        again = results[0].contents  # as the body runs only while its condition holds
        trips = self.trips(
            trips, trips == 0 or (again is not None and again.reshape(-1).tolist() == [True])
        )
        return [*state, *(_stacked(fact, trips) for fact in results[1 + len(state) :])]

    def _scan(self, operation: Operation) -> list[Fact]:
        graph, count = (
            operation.attributes["body"].as_graph(),
            operation.attributes["num_scan_inputs"].as_int(),
        )
        first = len(operation.inputs) - count
        if not 0 <= first <= len(operation.inputs):
            raise ValueError(f"{count} inputs are scanned, of {len(operation.inputs)}")
        facts = [_forgetful(self.fact(value)) for value in operation.inputs]
        state, scanned = facts[:first], facts[first:]
        axes = operation.attributes.get_ints("scan_input_axes") or [0] * count
        sizes = [fact.shape[axis] for fact, axis in zip(scanned, axes, strict=True) if fact.shape]
        trips = next((size for size in sizes if isinstance(size, int)), sizes[0] if sizes else None)
        slices = [_without_axis(fact, axis) for fact, axis in zip(scanned, axes, strict=True)]
        state, results = self._runs(graph, lambda state: (*state, *slices), state, 0, trips)
        out_axes = operation.attributes.get_ints("scan_output_axes") or [0] * len(results)
        trips = self.trips(trips, True)
        stacked = (
            _stacked(fact, trips, axis)
            for fact, axis in zip(results[first:], out_axes, strict=False)
        )
        return [*state, *stacked]

    def _runs(
        self,
        graph: ir.Graph,
        given: Callable[[list[Fact]], Sequence[Fact]],
        state: list[Fact],
        first: int,
        trips: Dim | None,
    ) -> tuple[list[Fact], list[Fact]]:
        """Run the body of a loop: its state, which its results have from place ``first`` on, and all results."""
        results: list[Fact] = []

        def run(state: list[Fact]) -> list[Fact]:
            results[:] = self.body(
                "body", graph, given(state), trips if isinstance(trips, int) else None
            )
            return results[first : first + len(state)]

        return self.repeat(state, run), results

    def _sequence_map(self, operation: Operation) -> list[Fact]:
        graph = operation.attributes["body"].as_graph()
        given = [_element(self.fact(value)) for value in operation.inputs]
        results = self.body("body", graph, given, None)
        return [
            Fact() if fact.type is None else Fact(ir.SequenceType(fact.type)) for fact in results
        ]

    def _control_flow(self, operation: Operation) -> None:
        runs = {
            "If": self._if,
            "Loop": self._loop,
            "Scan": self._scan,
            "SequenceMap": self._sequence_map,
        }
        run = runs[operation.op_type]
        try:
            results = run(operation)
        except _NOT_VALID:
            results = []
        self._conclude(operation, results)

    def _conclude(self, operation: Operation, results: Sequence[Fact]) -> None:
        """Note what a function or a subgraph gave, under the names that the node gives it."""
        for place, value in enumerate(operation.outputs):
            fact = results[place] if place < len(results) else Fact()
            self.state(
                value, Fact(fact.type, self._settled(value, fact.shape), fact.contents, fact.array)
            )

    def _constant(self, operation: Operation) -> None:
        value = operation.outputs[0]
        if value.const_value is not None:
            return  # that is looked at when it is asked for
        self._contents.pop(value, None)
        self._arrays.pop(value, None)
        tensor = constant_tensor(
            operation.resolved.outputs[0] if isinstance(operation, _Called) else value
        )
        if tensor is None:  # its value is not written as ONNX has it
            return
        self._types[value], self._shapes[value] = tensor.dtype, tuple(tensor.shape.numpy())
        if isinstance(operation, _Called):
            self._arrays[value] = small_array(tensor)

    def _infer(self, operation: Operation) -> None:
        rules, outputs = rules_of(operation.domain, operation.op_type), operation.outputs
        for value in outputs:
            self._contents[value] = self._arrays[value] = None
            if self._depth:  # it may be visited again
                self._types.pop(value, None)
        if operation.attributes and any(
            attribute.is_ref() for attribute in operation.attributes.values()
        ):
            self._conclude(operation, ())  # an attribute is known only where its function is called
            return
        typed = True
        shapes = _safely(rules.shape, operation, self)
        for place, value in enumerate(outputs):
            self._shapes[value] = self._settled(
                value, shapes[place] if shapes and place < len(shapes) else None
            )
            if value.type is None or self._in_function:
                dtype = self._type_of(operation, place)
                typed = typed and dtype is not None
                if dtype is not None:
                    self._types[value] = dtype
        if len(outputs) == 1 and rules.contents is not None:
            contents = _safely(rules.contents, operation, self)
            if contents is not None and small_contents(contents):
                self._contents[outputs[0]] = contents
                del self._arrays[outputs[0]]  # they are those of the contents
                return
        if self._evaluate(operation):
            return
        known = shapes is not None and len(shapes) >= sum(bool(value.name) for value in outputs)
        if not known or not typed or any(shape is None or None in shape for shape in shapes or ()):
            self._ask_onnx(operation, shapes or ())

    def _type_of(self, operation: Operation, place: int) -> ir.DataType | None:
        rule = rules_of(operation.domain, operation.op_type).type if place == 0 else None
        if rule is not None:
            return _safely(rule, operation, self)
        source = type_source(operation.op_type, self._version(operation), operation.domain, place)
        if source is None or isinstance(source, ir.DataType):
            return source
        value = operation.inputs[source] if source < len(operation.inputs) else None
        known = None if value is None else self._known_type(value)
        return (
            known.dtype
            if isinstance(known, ir.TensorType)
            else known
            if isinstance(known, ir.DataType)
            else None
        )

    def _evaluate(self, operation: Operation) -> bool:
        if not operation.inputs or any(
            value is not None and self.array(value) is None for value in operation.inputs
        ):
            return False
        arrays = evaluated(
            operation, self._version(operation), list(map(self.fact, operation.inputs))
        )
        if arrays is None:
            return False
        for value, array in zip(operation.outputs, arrays, strict=True):
            kind = self.type(value) or ir.TensorType(ir.DataType.from_numpy(array.dtype))
            self.state(value, Fact(kind, array.shape, None, array))
        return True

    def _ask_onnx(self, operation: Operation, shapes: Sequence[Dims | None]) -> None:
        """Complete what a rule said, or did not, with what ONNX's own inference says of the node."""
        results = inferred(
            operation, self._version(operation), list(map(self.fact, operation.inputs))
        )
        for place, (value, (kind, shape)) in enumerate(
            zip(operation.outputs, results, strict=True)
        ):
            dims = shapes[place] if place < len(shapes) else None
            if dims is None:
                dims = shape
            elif shape is not None and len(shape) == len(dims):
                dims = [
                    theirs if dim is None else dim for dim, theirs in zip(dims, shape, strict=True)
                ]
            self._shapes[value] = self._settled(value, dims)
            if kind is not None and (self._types.get(value) is None or self._in_function):
                self._types[value] = kind

    def _version(self, operation: Operation) -> int:
        return self._opsets.get(operation.domain, 0)


_NOT_VALID = (
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    MemoryError,
    TypeError,
    ValueError,
)
"""What a rule raises for a node that is not as the definition of its operator has it."""


def _safely(
    rule: Callable[[Operation, Known], _T | None] | None, node: Operation, known: Known
) -> _T | None:
    """What a rule says; None for a node that is not valid."""
    try:
        return None if rule is None else rule(node, known)
    except _NOT_VALID:
        return None


def _forgetful(fact: Fact | None) -> Fact:
    return Fact() if fact is None else fact.forgetting_values()


def _element(fact: Fact | None) -> Fact:
    """What is known of each element of a sequence; of a tensor, which every run of the body gets, all but values."""
    if fact is None or not isinstance(fact.type, ir.SequenceType):
        return _forgetful(fact)
    return Fact(fact.type.elem_type)


def _without_axis(fact: Fact, axis: int) -> Fact:
    if fact.shape is None:
        return fact
    axis %= max(1, len(fact.shape))
    return Fact(fact.type, (*fact.shape[:axis], *fact.shape[axis + 1 :]))


def _stacked(fact: Fact, trips: Dim | None, axis: int = 0) -> Fact:
    if fact.shape is None:
        return fact.forgetting_values()
    axis %= len(fact.shape) + 1
    return Fact(fact.type, (*fact.shape[:axis], trips, *fact.shape[axis:]))


_MOST_VISITS = 200_000
"""Nodes that are visited inside functions and bodies; a few bytes of a file can ask for any number of them."""

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class _Called:
    """A node of a function's body, with the attributes that the call gives it."""

    node: ir.Node
    resolved: ir.Node

    domain = property(lambda self: self.node.domain)
    op_type = property(lambda self: self.node.op_type)
    inputs = property(lambda self: self.node.inputs)
    outputs = property(lambda self: self.node.outputs)
    attributes = property(lambda self: self.resolved.attributes)
