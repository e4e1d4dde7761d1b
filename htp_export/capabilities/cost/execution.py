"""What happens when a model runs: its nodes in order, each with the tensors it reads and makes, by shape.

Functions are looked into: a node of a function's body runs once for each call. See ``shapes`` for how this is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy.typing as npt
import onnx_ir as ir

Origin: TypeAlias = Literal["input", "weight", "constant", "made"]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of one run. Two are the same if they are the same object.

    Attributes:
        name: Its name in the file.
        dtype: Its element type; None where it is not known.
        shape: Its sizes; None where one of them is not known.
        origin: An input of the model, an initializer, what a ``Constant`` node gives, or what another node makes.
        value: What is in it, where that is known from shapes and small constants alone.
        viewed: The tensor whose memory it is; None where it has its own.
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
    """A subgraph that a node runs.

    Attributes:
        steps: What happens in one run of it.
        times: How often it runs.
        inputs: What it is given in each run.
        outputs: What it gives back.
    """

    steps: Sequence[RunStep]
    times: int
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()


@dataclass(frozen=True, eq=False)
class RunStep:
    """One run of one node.

    Attributes:
        node: The node.
        owners: The modules it computes; in the body of a shared function, those of this call.
        inputs: What it reads; None for inputs that are left out.
        outputs: What it makes.
        attributes: Its attributes; in a function's body, with what this call gives.
        bodies: Its subgraphs: both branches of an ``If``, the body of a ``Loop`` or ``Scan``.
        trips_known: Whether ``times`` of its bodies is known; where not, it is 1.
        modules: The modules in whose regions it is.
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
        """The shape of an input.

        Raises:
            UnknownShapeError: If the input is left out, or its shape is not known.
        """
        tensor = self.input(position)
        if tensor is None or tensor.shape is None:
            raise UnknownShapeError(f"input {position} of {self.node.op_type}")
        return tensor.shape

    def output_shape(self, position: int = 0) -> tuple[int, ...]:
        """The shape of an output.

        Raises:
            UnknownShapeError: If there is no such output, or its shape is not known.
        """
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
    """One run of a model.

    Attributes:
        steps: Its nodes in order; those of functions in place of the calls.
        outputs: What it returns.
        sizes: Name of an open size of the inputs → the size that was used.
        notes: What was assumed of sizes.
        unknown: Why the first shape that is not known is not; empty where all are.
    """

    steps: Sequence[RunStep]
    outputs: Sequence[Tensor]
    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    unknown: str = ""


class UnknownShapeError(Exception):
    """A formula needs a shape that is not known."""


def walk(steps: Sequence[RunStep], times: int = 1) -> Iterator[tuple[RunStep, int]]:
    """Every step, with those in bodies after the one that holds them, and how often each runs."""
    for step in steps:
        yield step, times
        for body in step.bodies:
            yield from walk(body.steps, times * body.times)
