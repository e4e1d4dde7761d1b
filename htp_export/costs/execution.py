"""What happens when a model runs: its nodes in order, each with the tensors it reads and makes, by shape.

Weights are not read. Shapes that cannot be inferred are those that the file says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from htp_export.format.bounds import LARGEST
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.inputs import Inputs, default_shapes
from htp_export.shapes.inference import Inference
from htp_export.shapes.known import MOST_ELEMENTS, Dims, Fact, Operation, possible
from htp_export.shapes.operator_kinds import RESHAPING, VIEW, is_standard
from htp_export.shapes.sizes import Dim

Origin: TypeAlias = Literal["input", "weight", "constant", "made"]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of one run. Two are the same if they are the same object.

    Type and shape are None where they are not known. ``value`` is what is in it, where that is
    known from shapes and small constants alone; ``viewed`` is the tensor whose memory it is, None
    where it has its own.
    """

    name: str
    dtype: ir.DataType | None
    shape: tuple[int, ...] | None
    origin: Origin = "made"
    value: npt.NDArray[Any] | None = None
    viewed: Tensor | None = None

    @property
    def elements(self) -> int:
        """How many elements it has; 0 where its shape is not known."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Its size; 0 where its type or shape is not known, and for strings."""
        if self.dtype is None or self.dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING):
            return 0
        return -(-self.elements * self.dtype.bitwidth // 8)

    @property
    def buffer(self) -> Tensor:
        """The tensor that has the memory."""
        tensor = self
        while tensor.viewed is not None:
            tensor = tensor.viewed
        return tensor


@dataclass(frozen=True, eq=False)
class Body:
    """A subgraph that a node runs ``times`` times, and what goes in and out of each run."""

    steps: Sequence[RunStep]
    times: int
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()


@dataclass(frozen=True, eq=False)
class RunStep:
    """One run of one node; its subgraphs are both branches of an ``If``, or the body of a ``Loop`` or ``Scan``.

    ``owners`` are the modules that it computes, ``modules`` those in whose regions it is; inputs
    that are left out are None. ``trips_known``: whether ``times`` of its bodies is known; where
    not, it is 1.
    """

    node: ir.Node
    owners: tuple[str, ...]
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, ir.Attr] = field(default_factory=dict)
    bodies: tuple[Body, ...] = ()
    trips_known: bool = True
    modules: AbstractSet[str] = frozenset()

    @property
    def op(self) -> tuple[str, str]:
        """Domain and type of its operator; the domain of ONNX itself is ``""``."""
        return self.node.domain, self.node.op_type

    def input(self, position: int) -> Tensor | None:
        """An input; None where it is left out."""
        return self.inputs[position] if position < len(self.inputs) else None

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an input; an `UnknownShapeError` if it is left out, or not known."""
        tensor = self.input(position)
        if tensor is None or tensor.shape is None:
            raise UnknownShapeError(f"input {position} of {self.node.op_type}")
        return tensor.shape

    def output_shape(self, position: int = 0) -> tuple[int, ...]:
        """The shape of an output; an `UnknownShapeError` if there is none, or it is not known."""
        shape = self.outputs[position].shape if position < len(self.outputs) else None
        if shape is None:
            raise UnknownShapeError(f"output {position} of {self.node.op_type}")
        return shape

    def integer(self, name: str, default: int = 0) -> int:
        """An attribute that is a whole number."""
        return int(self._attribute(name, ir.AttributeType.INT, default))

    def real(self, name: str, default: float) -> float:
        """An attribute that is a number."""
        return float(self._attribute(name, ir.AttributeType.FLOAT, default))

    def text(self, name: str, default: str = "") -> str:
        """An attribute that is a string."""
        return str(self._attribute(name, ir.AttributeType.STRING, default))

    def integers(self, name: str) -> tuple[int, ...]:
        """An attribute that is a list of whole numbers; empty where it is left out."""
        return tuple(self._attribute(name, ir.AttributeType.INTS, ()))

    def _attribute(self, name: str, kind: ir.AttributeType, default: Any) -> Any:
        attribute = self.attributes.get(name)
        return attribute.value if attribute is not None and attribute.type == kind else default


@dataclass(frozen=True, eq=False)
class Run:
    """One run of a model: its nodes in order, those of functions in place of the calls.

    ``sizes`` are the open sizes that were used, ``notes`` what was assumed of them, and ``unknown``
    is the first tensor whose shape is not known.
    """

    steps: Sequence[RunStep]
    outputs: Sequence[Tensor]
    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    unknown: str = ""


class UnknownShapeError(Exception):
    """A formula needs a shape that is not known."""


def walk(steps: Sequence[RunStep], times: int = 1) -> Iterator[tuple[RunStep, int]]:
    """Every step, with those in bodies after the one that holds them, and how often each runs.

    Loops in loops of a file may run more often than can be printed; more than 64 bits say no more.
    """
    for step in steps:
        yield step, times
        for body in step.bodies:
            yield from walk(body.steps, min(times * body.times, LARGEST))


# ONNX Runtime gives the output of these the memory of the input.
_VIEWS = RESHAPING | {"Identity"}


def run_by_shapes(
    tagged: TaggedModel,
    inputs: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Run:
    """What happens in one run of a model without functions; a function that cannot be dissolved is a step.

    ``inputs``: input name → example, anything with a ``shape``, or nested lists. What nothing tells
    is 1, with a note. An `InputError` if sizes contradict each other or the model, or the number of
    dimensions of an input is not known.
    """
    examples = {
        name: example if hasattr(example, "shape") else np.asarray(example)
        for name, example in (inputs or {}).items()
    }
    example_shapes = {
        name: tuple(int(size) for size in example.shape) for name, example in examples.items()
    }
    wanted = Inputs.of(tagged.model)
    bound, notes = wanted.assume(
        wanted.bind(dims=dims, shapes={**example_shapes, **(shapes or {})})
    )
    bound.check()
    tensors, impossible = {}, ""
    for declared in wanted:
        known = (
            _small(examples[declared.name])
            if declared.name in examples and declared.type is not None
            else None
        )
        shape = bound.shapes[declared.name]
        # all are: see above
        sizes = None if shape is None else tuple(size for size in shape if size is not None)
        if sizes is not None and possible(sizes) is None:  # of a file
            sizes, impossible = None, impossible or f"first {declared.name!r}"
        tensors[declared.name] = Tensor(declared.name, declared.type, sizes, "input", known)
    runner = _Runner(tagged, tensors, bound.sizes)
    runner.first_unknown = impossible
    runner.walk(tagged.model.graph)
    outputs = [runner.tensor(value) for value in tagged.model.graph.outputs]
    return Run(runner.steps, outputs, bound.sizes, notes, runner.first_unknown)


def _small(array: Any) -> Any:
    """The values of an example that may say sizes: whole numbers, and few of them."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = (
            array.numpy()
            if str(array.dtype).startswith(("torch.int", "torch.bool", "torch.uint"))
            else None
        )
    if (
        isinstance(array, np.ndarray | np.generic)
        and array.dtype.kind in "iub"
        and array.size <= MOST_ELEMENTS
    ):
        return np.asarray(array)
    return None


class _Runner(Inference):
    """One run, of which each node of the main graph and of its subgraphs is a step."""

    def __init__(
        self, tagged: TaggedModel, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]
    ) -> None:
        super().__init__(tagged.model.opset_imports, tagged.model.functions, sizes)
        self._tagged = tagged
        self._tensors: dict[ir.Value, Tensor] = {}
        self.first_unknown = ""
        self.steps: list[RunStep] = []
        self._bodies: list[Body] = []
        self._trips_known = True
        left_out = default_shapes(tagged.model.graph)
        for value in tagged.model.graph.inputs:
            tensor = inputs.get(str(value.name))
            if tensor is not None:
                kind = None if tensor.dtype is None else ir.TensorType(tensor.dtype)
                self.state(value, Fact(kind, tensor.shape, None, tensor.value))
                self._tensors[value] = tensor
            elif value.name in left_out:
                self.state(value, Fact(value.type, left_out[value.name]))

    def visit(self, node: ir.Node) -> None:
        inputs = tuple(None if value is None else self.tensor(value) for value in node.inputs)
        outer, self._bodies, self._trips_known = self._bodies, [], True
        super().visit(node)
        bodies, self._bodies, trips_known = tuple(self._bodies), outer, self._trips_known
        is_view = node.meta.get(VIEW) or is_standard(node, *_VIEWS)
        views = inputs[0] if inputs and is_view else None
        origin: Origin = "constant" if node.op_type == "Constant" and node.domain == "" else "made"
        outputs = tuple(self._new(value, origin, views) for value in node.outputs)
        self._tensors.update(zip(node.outputs, outputs, strict=True))
        work = self._tagged.work_of(node)
        attributes = self.operation(node).attributes
        self.steps.append(
            RunStep(
                node, work.owners, inputs, outputs, attributes, bodies, trips_known, work.modules
            )
        )

    def call(self, function: ir.Function, operation: Operation) -> None:
        """Infer what a function makes; its nodes are no steps."""
        steps, self.steps = self.steps, []
        super().call(function, operation)
        self.steps = steps

    def body(
        self, name: str, graph: ir.Graph, facts: Sequence[Fact], times: int | None
    ) -> list[Fact]:
        for value, fact in zip(graph.inputs, facts, strict=False):
            self.state(value, fact)
        tensors = [self._new(value, "made") for value in graph.inputs[: len(facts)]]
        self._tensors.update(zip(graph.inputs, tensors, strict=False))
        outer, self.steps = self.steps, []
        results = super().body(name, graph, facts, times)
        steps, self.steps = self.steps, outer
        outputs = [self.tensor(value) for value in graph.outputs]
        self._bodies.append(Body(steps, 1 if times is None else times, tensors, outputs))
        self._trips_known = times is not None
        return results

    def either(self, first: Fact, second: Fact) -> Fact:
        """The larger of what two branches give: the one that costs more."""
        return max(
            first, second, key=lambda fact: -1 if fact.shape is None else _elements(fact.shape)
        )

    def repeat(self, state: list[Fact], run: Callable[[list[Fact]], list[Fact]]) -> list[Fact]:
        """One run of the body stands for all."""
        return run(state)

    def trips(self, trips: Dim | None, certain: bool) -> Dim | None:
        """A loop runs as often as it says it may, and once where that is not known."""
        return 1 if trips is None else trips

    def tensor(self, value: ir.Value) -> Tensor:
        if value not in self._tensors:
            # A weight, a constant that is an input, a value from outside of a function, or no valid
            # model.
            origin: Origin = (
                "weight" if value.const_value is not None and value.producer() is None else "made"
            )
            self._tensors[value] = self._new(value, origin)
        return self._tensors[value]

    def _new(self, value: ir.Value, origin: Origin, viewed: Tensor | None = None) -> Tensor:
        kind, shape = self.type(value), self.shape(value)
        sizes = None if shape is None else tuple(dim for dim in shape if isinstance(dim, int))
        dtype = kind.dtype if isinstance(kind, ir.TensorType) else None
        numbers = (
            sizes if shape is not None and sizes is not None and len(sizes) == len(shape) else None
        )
        if numbers is None and value.name and not self.first_unknown:
            node = value.producer()
            self.first_unknown = f"first {value.name!r}" + (
                "" if node is None else f", made by {node.op_type}"
            )
        return Tensor(value.name or "", dtype, numbers, origin, self.array(value), viewed)


def _elements(shape: Dims) -> int:
    return math.prod(dim if isinstance(dim, int) else 1 for dim in shape)
