"""Shape inference: one walk over a graph in order, into subgraphs and the bodies of functions."""

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
from htp_export.shapes.operators import Rules, rules_of
from htp_export.shapes.schemas import evaluated, inferred, type_source
from htp_export.shapes.sizes import Dim

_MOST_TRIPS = 2**31
"""A trip count from which a loop counts as unbounded.

Exporters write such a count for a loop that only its condition ends; it is no size of a result.
"""


class Inference(Known):
    """Infers types, shapes and small contents while it walks over a graph.

    A subclass can observe each visited node by overriding `visit`, `body` and `call`. ``sizes``
    replaces open dimensions with numbers.
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
        """Infer the outputs of a node from its inputs."""
        operation = self.operation(node) if self._calling else node
        self._visits += self._depth > 0
        function = self._functions.get(node.op_identifier()) if self._functions else None
        has_control_flow = operation.op_type in CONTROL_FLOW
        if self._visits > _MOST_VISITS and (function is not None or has_control_flow):
            self._conclude(operation, ())
        elif function is not None and function not in self._calling:
            self.call(function, operation)
        elif operation.domain != "":
            self._infer(operation)
        elif has_control_flow or operation.op_type == "SequenceMap":
            self._control_flow(operation)
        elif operation.op_type == "Constant":
            self._constant(operation)
        else:
            self._infer(operation)

    def operation(self, node: ir.Node) -> Operation:
        """A node whose references to attributes of the called function are resolved."""
        if not _has_references(node.attributes):
            return node
        resolved = []
        for name, attribute in node.attributes.items():
            if not attribute.is_ref():
                resolved.append(attribute)
                continue
            argument = self._attributes.get(str(attribute.ref_attr_name))
            if argument is not None:
                resolved.append(ir.Attr(name, attribute.type, argument.value))
        return _Called(node, ir.Node(node.domain, node.op_type, (), resolved))

    def call(self, function: ir.Function, operation: Operation) -> None:
        """Walk over the body of a function with the arguments and attributes of one call."""
        saved = self._attributes, self._opsets, self._in_function
        arguments = [self.fact(value) for value in operation.inputs]
        defaults = {
            name: attribute
            for name, attribute in function.attributes.items()
            if attribute.value is not None
        }
        self._attributes = {**defaults, **operation.attributes}
        self._opsets = {**self._opsets, **function.opset_imports}
        self._calling.append(function)
        self._in_function = True
        self._calls += 1
        for index, formal in enumerate(function.inputs):
            argument = arguments[index] if index < len(arguments) else None
            self.state(formal, argument or Fact())
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
        """Walk over a subgraph and return the facts of its outputs.

        ``name`` is the attribute that holds it, ``times`` the number of its runs, if that is known.
        """
        for value, fact in zip(graph.inputs, inputs, strict=False):
            self.state(value, fact)
        self._depth += 1
        self.walk(graph)
        self._depth -= 1
        return [self.fact(value) or Fact() for value in graph.outputs]

    def either(self, first: Fact, second: Fact) -> Fact:
        """Return the facts that hold for both of two tensors, such as results of two branches."""
        kind = first.type if first.type == second.type else None
        shape = _common_dims(first.shape, second.shape)
        one = first.contents
        other = second.contents
        if one is None or other is None or one.shape != other.shape:
            return Fact(kind, shape)
        pairs = zip(one.reshape(-1), other.reshape(-1), strict=True)
        if all(a == b for a, b in pairs):
            return Fact(kind, shape, one)
        return Fact(kind, shape)

    def repeat(self, state: list[Fact], run: Callable[[list[Fact]], list[Fact]]) -> list[Fact]:
        """Return facts of a loop's state that hold before each run of its body and after the last.

        This is a fixed point: each round forgets at least one dimension, so that it is reached.
        """
        while True:
            common = []
            is_stable = True
            for before, after in zip(state, run(state), strict=False):
                joined = self.either(before, after).forgetting_values()
                is_stable = (
                    is_stable and before.shape == joined.shape and before.type == joined.type
                )
                common.append(joined)
            if is_stable:
                return common
            state = common

    def trips(self, trips: Dim | None, certain: bool) -> Dim | None:
        """Return the number of runs of a loop body, if the loop certainly does not end earlier."""
        return trips if certain else None

    def _if(self, operation: Operation) -> list[Fact]:
        """Infer the results of a branch, or of both if the condition is unknown."""
        condition = self.constant(operation.inputs[0])
        if condition is not None:
            branch = "then_branch" if condition[0] else "else_branch"
            return self.body(branch, operation.attributes[branch].as_graph(), (), 1)
        then_facts, else_facts = (
            self.body(name, operation.attributes[name].as_graph(), (), 1)
            for name in ("then_branch", "else_branch")
        )
        return [self.either(*pair) for pair in zip(then_facts, else_facts, strict=True)]

    def _loop(self, operation: Operation) -> list[Fact]:
        """Infer the state and the scan outputs of a ``Loop``."""
        graph = operation.attributes["body"].as_graph()
        most, condition, *_ = (*operation.inputs, None, None)  # both inputs are optional
        count = self.contents(most)
        initial_condition = self.constant(condition)
        trips: Dim | None = None if count is None else count.reshape(-1)[0]
        if initial_condition is not None and not all(initial_condition):
            trips = 0
        elif isinstance(trips, int) and not 0 <= trips < _MOST_TRIPS:
            trips = None
        counter = Fact(ir.TensorType(ir.DataType.INT64), ())
        # The body runs only while its condition holds.
        is_true = Fact(ir.TensorType(ir.DataType.BOOL), (), objects(True))
        state = [_forgetful(self.fact(value)) for value in operation.inputs[2:]]
        state, results = self._runs(
            graph, lambda state: (counter, is_true, *state), state, 1, trips
        )
        next_condition = results[0].contents
        always_continues = next_condition is not None and next_condition.reshape(-1).tolist() == [
            True
        ]
        trips = self.trips(trips, trips == 0 or always_continues)
        return [*state, *(_stacked(fact, trips) for fact in results[1 + len(state) :])]

    def _scan(self, operation: Operation) -> list[Fact]:
        """Infer the state and the scan outputs of a ``Scan``."""
        graph = operation.attributes["body"].as_graph()
        count = operation.attributes["num_scan_inputs"].as_int()
        first = len(operation.inputs) - count
        if not 0 <= first <= len(operation.inputs):
            raise ValueError(f"{count} inputs are scanned, of {len(operation.inputs)}")
        facts = [_forgetful(self.fact(value)) for value in operation.inputs]
        state = facts[:first]
        scanned = facts[first:]
        axes = operation.attributes.get_ints("scan_input_axes") or [0] * count
        sizes: list[Dim | None] = []
        slices: list[Fact] = []
        for fact, axis in zip(scanned, axes, strict=True):
            if fact.shape:
                sizes.append(fact.shape[axis])
            slices.append(_without_axis(fact, axis))
        # All scanned inputs have the same length: a number is more precise than a name.
        numbers = [size for size in sizes if isinstance(size, int)]
        trips = next(iter([*numbers, *sizes]), None)
        state, results = self._runs(graph, lambda state: (*state, *slices), state, 0, trips)
        out_axes = operation.attributes.get_ints("scan_output_axes") or [0] * len(results)
        trips = self.trips(trips, True)
        scan_outputs = zip(results[first:], out_axes, strict=False)
        return [*state, *(_stacked(fact, trips, axis) for fact, axis in scan_outputs)]

    def _runs(
        self,
        graph: ir.Graph,
        arguments: Callable[[list[Fact]], Sequence[Fact]],
        state: list[Fact],
        first: int,
        trips: Dim | None,
    ) -> tuple[list[Fact], list[Fact]]:
        """Run the body of a loop; return its state and all results.

        The state is among the results, from index ``first`` on.
        """
        results: list[Fact] = []

        def run(state: list[Fact]) -> list[Fact]:
            times = trips if isinstance(trips, int) else None
            results[:] = self.body("body", graph, arguments(state), times)
            return results[first : first + len(state)]

        return self.repeat(state, run), results

    def _sequence_map(self, operation: Operation) -> list[Fact]:
        """Infer the sequences that a ``SequenceMap`` returns."""
        graph = operation.attributes["body"].as_graph()
        arguments = [_element(self.fact(value)) for value in operation.inputs]
        sequences = []
        for result in self.body("body", graph, arguments, None):
            if result.type is None:
                sequences.append(Fact())
            else:
                sequences.append(Fact(ir.SequenceType(result.type)))
        return sequences

    def _control_flow(self, operation: Operation) -> None:
        """Infer a node with subgraphs; its results are unknown if it is invalid."""
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
        """Record the results of a function or subgraph as facts of the node's outputs."""
        for index, value in enumerate(operation.outputs):
            result = results[index] if index < len(results) else Fact()
            shape = self._settled(value, result.shape)
            self.state(value, Fact(result.type, shape, result.contents, result.array))

    def _constant(self, operation: Operation) -> None:
        """Look up the tensor of a ``Constant``, in a function with the attributes of the call."""
        value = operation.outputs[0]
        if value.const_value is not None:
            return  # `Known` looks at constants when they are first needed
        self._contents.pop(value, None)
        self._arrays.pop(value, None)
        tensor = constant_tensor(
            operation.resolved.outputs[0] if isinstance(operation, _Called) else value
        )
        if tensor is None:  # not a valid Constant
            return
        self._types[value] = tensor.dtype
        self._shapes[value] = tuple(tensor.shape.numpy())
        if isinstance(operation, _Called):
            self._arrays[value] = small_array(tensor)

    def _infer(self, operation: Operation) -> None:
        """Infer a node by the rules of its operator, then by evaluation, then by ONNX."""
        rules = rules_of(operation.domain, operation.op_type)
        outputs = operation.outputs
        self._forget(outputs)
        if _has_references(operation.attributes):
            # A reference has a value only where its function is called.
            self._conclude(operation, ())
            return
        shapes = _safely(rules.shape, operation, self)
        for index, value in enumerate(outputs):
            inferred_shape = shapes[index] if shapes and index < len(shapes) else None
            self._shapes[value] = self._settled(value, inferred_shape)
        typed = self._infer_types(operation)
        # Contents need the shape: their rules ask for it.
        if self._infer_contents(operation, rules) or self._evaluate(operation):
            return
        named_outputs = sum(bool(value.name) for value in outputs)
        has_all_shapes = shapes is not None and len(shapes) >= named_outputs
        has_all_dims = all(shape is not None and None not in shape for shape in shapes or ())
        if not (typed and has_all_shapes and has_all_dims):
            self._ask_onnx(operation, shapes or ())

    def _forget(self, outputs: Sequence[ir.Value]) -> None:
        """Forget what an earlier visit of the node found."""
        for value in outputs:
            self._contents[value] = self._arrays[value] = None
            if self._depth:
                self._types.pop(value, None)

    def _infer_contents(self, operation: Operation, rules: Rules) -> bool:
        """Infer the contents of a single output; return whether its rule returned small ones."""
        if len(operation.outputs) != 1:
            return False
        contents = _safely(rules.contents, operation, self)
        if contents is None or not small_contents(contents):
            return False
        [value] = operation.outputs
        self._contents[value] = contents
        if self._shapes[value] is None:
            # There are operators with a rule for contents, but none for shapes.
            self._shapes[value] = self._settled(value, contents.shape)
        del self._arrays[value]  # the array is computed from the contents
        return True

    def _infer_types(self, operation: Operation) -> bool:
        """Infer element types that the file does not state; return whether all are known."""
        all_known = True
        for index, value in enumerate(operation.outputs):
            if value.type is not None and not self._in_function:
                continue
            dtype = self._type_of(operation, index)
            if dtype is None:
                all_known = False
            else:
                self._types[value] = dtype
        return all_known

    def _type_of(self, operation: Operation, place: int) -> ir.DataType | None:
        """Infer an element type by a rule or by the operator's schema."""
        rule = rules_of(operation.domain, operation.op_type).type if place == 0 else None
        if rule is not None:
            return _safely(rule, operation, self)
        source = type_source(operation.op_type, self._version(operation), operation.domain, place)
        if source is None or isinstance(source, ir.DataType):
            return source
        value = operation.inputs[source] if source < len(operation.inputs) else None
        known = None if value is None else self._known_type(value)
        if isinstance(known, ir.TensorType):
            return known.dtype
        return known if isinstance(known, ir.DataType) else None

    def _evaluate(self, operation: Operation) -> bool:
        """Compute the outputs of a node with constant inputs; return whether that was possible."""
        if not operation.inputs:
            return False
        if any(value is not None and self.array(value) is None for value in operation.inputs):
            return False
        facts = [self.fact(value) for value in operation.inputs]
        arrays = evaluated(operation, self._version(operation), facts)
        if arrays is None:
            return False
        for value, array in zip(operation.outputs, arrays, strict=True):
            kind = self.type(value) or ir.TensorType(ir.DataType.from_numpy(array.dtype))
            self.state(value, Fact(kind, array.shape, None, array))
        return True

    def _ask_onnx(self, operation: Operation, shapes: Sequence[Dims | None]) -> None:
        """Complete the results of a rule by ONNX's own inference of the node."""
        facts = [self.fact(value) for value in operation.inputs]
        results = inferred(operation, self._version(operation), facts)
        for index, value in enumerate(operation.outputs):
            kind, onnx_shape = results[index]
            dims = shapes[index] if index < len(shapes) else None
            self._shapes[value] = self._settled(value, _completed_dims(dims, onnx_shape))
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
"""Errors of a rule for a node that does not conform to its operator's definition."""


def _safely(
    rule: Callable[[Operation, Known], _T | None] | None, node: Operation, known: Known
) -> _T | None:
    """Return the result of a rule; None for an invalid node, and where there is no rule."""
    if rule is None:
        return None
    try:
        return rule(node, known)
    except _NOT_VALID:
        return None


def _has_references(attributes: Mapping[str, ir.Attr]) -> bool:
    """Whether one of some attributes refers to an attribute of the function around the node."""
    return any(attribute.is_ref() for attribute in attributes.values())


def _common_dims(first: Dims | None, second: Dims | None) -> Dims | None:
    """The dimensions that two shapes have in common; None if their ranks differ."""
    if first is None or second is None or len(first) != len(second):
        return None
    return tuple(a if a == b else None for a, b in zip(first, second, strict=True))


def _completed_dims(dims: Dims | None, onnx_shape: Dims | None) -> Dims | None:
    """A rule's shape, with ONNX's dimensions where the rule has none."""
    if dims is None:
        return onnx_shape
    if onnx_shape is None or len(onnx_shape) != len(dims):
        return dims
    return [theirs if dim is None else dim for dim, theirs in zip(dims, onnx_shape, strict=True)]


def _forgetful(fact: Fact | None) -> Fact:
    return Fact() if fact is None else fact.forgetting_values()


def _element(fact: Fact | None) -> Fact:
    """Facts of each element of a sequence; of a tensor, its type and shape in every run."""
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
"""The most visits of nodes inside functions and subgraphs.

Calls of calls multiply: a few bytes of a file can ask for any number of visits.
"""

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class _Called:
    """A node of a function's body, with the attributes of the call."""

    node: ir.Node
    resolved: ir.Node

    domain = property(lambda self: self.node.domain)
    op_type = property(lambda self: self.node.op_type)
    inputs = property(lambda self: self.node.inputs)
    outputs = property(lambda self: self.node.outputs)
    attributes = property(lambda self: self.resolved.attributes)
