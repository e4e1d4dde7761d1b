"""One run of a model by shapes: its nodes in order, each with its input and output tensors.

Weights are not loaded. A shape that cannot be inferred is taken from the file.
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
from htp_export.runtime.settings import DEFAULTS, RunSettings
from htp_export.shapes.inference import Inference
from htp_export.shapes.known import MOST_ELEMENTS, Dims, Fact, Operation, possible
from htp_export.shapes.operator_kinds import RESHAPING, VIEW, is_standard
from htp_export.shapes.sizes import Dim

Origin: TypeAlias = Literal["input", "weight", "constant", "made"]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of one run; two are equal only if they are the same object.

    Type and shape are None if unknown. ``value`` holds its elements, if they follow from shapes and
    small constants alone; ``viewed`` is the tensor whose memory it shares, or None.
    """

    name: str
    dtype: ir.DataType | None
    shape: tuple[int, ...] | None
    origin: Origin = "made"
    value: npt.NDArray[Any] | None = None
    viewed: Tensor | None = None

    @property
    def elements(self) -> int:
        """The number of elements; 0 if the shape is unknown."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size in bytes; 0 if type or shape is unknown, and for strings."""
        if self.dtype is None or self.dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING):
            return 0
        return -(-self.elements * self.dtype.bitwidth // 8)

    @property
    def buffer(self) -> Tensor:
        """The tensor that owns the memory."""
        tensor = self
        while tensor.viewed is not None:
            tensor = tensor.viewed
        return tensor


@dataclass(frozen=True, eq=False)
class Body:
    """A subgraph that a node runs ``times`` times, with its inputs and outputs in each run."""

    steps: Sequence[RunStep]
    times: int
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()


@dataclass(frozen=True, eq=False)
class RunStep:
    """One run of one node, with its subgraphs: both branches of ``If``, or the body of a loop.

    ``owners`` are the modules that it computes, ``modules`` the modules whose regions contain it.
    Absent optional inputs are None. ``trips_known`` is False if the ``times`` of its bodies is
    unknown and therefore 1.
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
        """Domain and type of the operator; ONNX's own domain is ``""``."""
        return self.node.domain, self.node.op_type

    def input(self, position: int) -> Tensor | None:
        """An input; None if it is absent."""
        if position < len(self.inputs):
            return self.inputs[position]
        return None

    def has_input(self, position: int) -> bool:
        """Whether an input is present."""
        return self.input(position) is not None

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an input; raises `UnknownShapeError` if it is absent or unknown."""
        tensor = self.input(position)
        if tensor is None or tensor.shape is None:
            raise UnknownShapeError(f"input {position} of {self.node.op_type}")
        return tensor.shape

    def output_shape(self, position: int = 0) -> tuple[int, ...]:
        """The shape of an output; raises `UnknownShapeError` if it is absent or unknown."""
        shape = self.outputs[position].shape if position < len(self.outputs) else None
        if shape is None:
            raise UnknownShapeError(f"output {position} of {self.node.op_type}")
        return shape

    def integer(self, name: str, default: int = 0) -> int:
        """An integer attribute."""
        return int(self._attribute(name, ir.AttributeType.INT, default))

    def real(self, name: str, default: float) -> float:
        """A float attribute."""
        return float(self._attribute(name, ir.AttributeType.FLOAT, default))

    def text(self, name: str, default: str = "") -> str:
        """A string attribute."""
        return str(self._attribute(name, ir.AttributeType.STRING, default))

    def integers(self, name: str) -> tuple[int, ...]:
        """An attribute with a list of integers; empty if it is absent."""
        return tuple(self._attribute(name, ir.AttributeType.INTS, ()))

    def _attribute(self, name: str, kind: ir.AttributeType, default: Any) -> Any:
        attribute = self.attributes.get(name)
        if attribute is not None and attribute.type == kind:
            return attribute.value
        return default


@dataclass(frozen=True, eq=False)
class Run:
    """One run of a model: its nodes in order, with the nodes of functions in place of calls.

    ``sizes`` maps open dimensions to the sizes that were used, ``notes`` lists the assumed ones,
    and ``unknown`` names the first tensor of unknown shape.
    """

    steps: Sequence[RunStep]
    outputs: Sequence[Tensor]
    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    unknown: str = ""


class UnknownShapeError(Exception):
    """A formula needs an unknown shape."""


def walk(steps: Sequence[RunStep], times: int = 1) -> Iterator[tuple[RunStep, int]]:
    """Yield every step and how often it runs; the steps of its bodies follow.

    The count is limited to 64 bits: nested loops could ask for a number too long to print.
    """
    for step in steps:
        yield step, times
        for body in step.bodies:
            yield from walk(body.steps, min(times * body.times, LARGEST))


# In ONNX Runtime, these outputs share the memory of their input.
_VIEWS = RESHAPING | {"Identity"}


def run_by_shapes(tagged: TaggedModel, settings: RunSettings = DEFAULTS) -> Run:
    """Infer one run of a model without functions; a function that was not inlined is one step.

    Args:
        tagged: The model.
        settings: Open dimensions of unknown size are 1, with a note. ``data`` are examples of one
            run, as of `RunSettings.with_one_run`: objects with a ``shape`` or nested lists. Inputs
            without an example have the shape in ``shapes``.

    Raises:
        InputError: Sizes contradict each other or the model, or the rank of an input is unknown.
    """
    examples: dict[str, Any] = {}
    example_shapes: dict[str, Sequence[int]] = {}
    given: Any = settings.data or {}  # arrays by input name: those of one run
    for name, example in given.items():
        examples[name] = example if hasattr(example, "shape") else np.asarray(example)
        example_shapes[name] = tuple(map(int, examples[name].shape))
    wanted = Inputs.of(tagged.model)
    bindings = wanted.bind(dims=settings.dims, shapes={**example_shapes, **(settings.shapes or {})})
    bound, notes = wanted.assume(bindings)
    bound.check()
    tensors: dict[str, Tensor] = {}
    first_impossible = ""
    for declared in wanted:
        name = declared.name
        array = None
        if name in examples and declared.type is not None:
            array = _small(examples[name])
        sizes = _possible_sizes(bound.shapes[name])
        if sizes is None and bound.shapes[name] is not None and not first_impossible:
            first_impossible = f"first {name!r}"
        tensors[name] = Tensor(name, declared.type, sizes, "input", array)
    runner = _Runner(tagged, tensors, bound.sizes)
    runner.first_unknown = first_impossible
    runner.walk(tagged.model.graph)
    outputs = [runner.tensor(value) for value in tagged.model.graph.outputs]
    return Run(runner.steps, outputs, bound.sizes, notes, runner.first_unknown)


def _possible_sizes(shape: Sequence[int | None] | None) -> tuple[int, ...] | None:
    """The sizes of an input; None if they are unknown, or so large that no tensor can have them."""
    if shape is None:
        return None
    # After `assume`, no size is None.
    sizes = tuple(size for size in shape if size is not None)
    # A file can state any sizes.
    return None if possible(sizes) is None else sizes


def _small(array: Any) -> Any:
    """An example that may contain sizes, as an array: a few integers. None for any other."""
    if hasattr(array, "detach"):
        if not str(array.dtype).startswith(("torch.int", "torch.bool", "torch.uint")):
            return None
        array = array.detach().cpu().numpy()
    if not isinstance(array, np.ndarray | np.generic):
        return None
    if array.dtype.kind not in "iub" or array.size > MOST_ELEMENTS:
        return None
    return np.asarray(array)


class _Runner(Inference):
    """Records each node of the main graph and its subgraphs as a step of one run."""

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
        outer = self._bodies
        self._bodies = []
        self._trips_known = True
        super().visit(node)
        bodies = tuple(self._bodies)
        self._bodies = outer
        trips_known = self._trips_known
        is_view = node.meta.get(VIEW) or is_standard(node, *_VIEWS)
        viewed = inputs[0] if inputs and is_view else None
        origin: Origin = "constant" if is_standard(node, "Constant") else "made"
        outputs = tuple(self._new(value, origin, viewed) for value in node.outputs)
        self._tensors.update(zip(node.outputs, outputs, strict=True))
        work = self._tagged.work_of(node)
        step = RunStep(
            node=node,
            owners=work.owners,
            inputs=inputs,
            outputs=outputs,
            attributes=self.operation(node).attributes,
            bodies=bodies,
            trips_known=trips_known,
            modules=work.modules,
        )
        self.steps.append(step)

    def call(self, function: ir.Function, operation: Operation) -> None:
        """Infer the outputs of a function, without steps for its nodes."""
        steps = self.steps
        self.steps = []
        super().call(function, operation)
        self.steps = steps

    def body(
        self, name: str, graph: ir.Graph, facts: Sequence[Fact], times: int | None
    ) -> list[Fact]:
        for value, fact in zip(graph.inputs, facts, strict=False):
            self.state(value, fact)
        tensors = [self._new(value, "made") for value in graph.inputs[: len(facts)]]
        self._tensors.update(zip(graph.inputs, tensors, strict=False))
        outer = self.steps
        self.steps = []
        results = super().body(name, graph, facts, times)
        steps = self.steps
        self.steps = outer
        outputs = [self.tensor(value) for value in graph.outputs]
        self._bodies.append(Body(steps, 1 if times is None else times, tensors, outputs))
        self._trips_known = times is not None
        return results

    def either(self, first: Fact, second: Fact) -> Fact:
        """The larger of two results of branches: that of the branch that costs more."""

        def elements(fact: Fact) -> int:
            return -1 if fact.shape is None else _elements(fact.shape)

        return max(first, second, key=elements)

    def repeat(self, state: list[Fact], run: Callable[[list[Fact]], list[Fact]]) -> list[Fact]:
        """Run the body once: it represents all runs."""
        return run(state)

    def trips(self, trips: Dim | None, certain: bool) -> Dim | None:
        """The trip count of a loop; 1 if it is unknown."""
        return 1 if trips is None else trips

    def tensor(self, value: ir.Value) -> Tensor:
        if value not in self._tensors:
            # A weight, an initializer that is an input, a value from outside of a function, or an
            # invalid model.
            is_weight = value.const_value is not None and value.producer() is None
            self._tensors[value] = self._new(value, "weight" if is_weight else "made")
        return self._tensors[value]

    def _new(self, value: ir.Value, origin: Origin, viewed: Tensor | None = None) -> Tensor:
        """A tensor of this run for a value; remembers the first one of unknown shape."""
        kind = self.type(value)
        shape = self.shape(value)
        dtype = kind.dtype if isinstance(kind, ir.TensorType) else None
        sizes = None
        if shape is not None and all(isinstance(dim, int) for dim in shape):
            sizes = tuple(dim for dim in shape if isinstance(dim, int))
        if sizes is None and value.name and not self.first_unknown:
            node = value.producer()
            producer = "" if node is None else f", made by {node.op_type}"
            self.first_unknown = f"first {value.name!r}{producer}"
        return Tensor(value.name or "", dtype, sizes, origin, self.array(value), viewed)


def _elements(shape: Dims) -> int:
    """The number of elements; open dimensions count as 1."""
    return math.prod(dim if isinstance(dim, int) else 1 for dim in shape)
