"""What methods see of a model: facts before anything is done, the model while it changes, data, and a metric."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.editing.submodels import Submodel, cut_out, in_copy, put_back, remove_unused
from htp_export.errors import InputError
from htp_export.files.parsing import model_from_proto
from htp_export.format import tags
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import Names
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.data import Data, Run, Samples, arrays_of
from htp_export.runtime.generating import Decoder
from htp_export.runtime.inputs import Feed
from htp_export.runtime.runner import Metric, Runner, measured_metric
from htp_export.runtime.sessions import SessionSettings
from htp_export.shapes.operator_kinds import dequantizes, quantizes


@dataclass(frozen=True)
class CalibrationData(Samples):
    """The inputs of runs, in none of which is NaN.

    Of a ``decoder`` with a key-value cache, a run that has the ids of tokens alone is a prompt,
    with an empty cache.
    """

    decoder: Decoder | None = None

    @classmethod
    def of(cls, data: Data | None, model: ir.Model, **settings: Any) -> CalibrationData:
        """The runs that a user's data stand for; see `Samples.of`."""
        samples = super().of(data, model, **settings)
        assert isinstance(samples, cls)
        try:
            return replace(samples, decoder=Decoder.of(model))
        except InputError:  # it is none
            return samples

    def _feed(self, run: Run, name: str) -> Feed:
        if self.decoder is not None and len(list(self.inputs)) > 1:
            name = os.fspath(run) if isinstance(run, str | os.PathLike) else name
            run = arrays_of(run)
            if isinstance(run, Mapping) and run.keys() == {
                each.name for each in self.decoder.of_prompts
            }:
                [ids] = (
                    replace(self, inputs=self.decoder.of_prompts)._feed(run, name).arrays.values()
                )
                run = self.decoder.first_feed(ids)
        return super()._feed(run, name)

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        for number, arrays in enumerate(super().__iter__()):
            for name in nan_in(arrays):
                raise InputError(
                    f"data, run {number}: input {name!r} has NaN, of which no range can be known"
                )
            yield arrays


@contextmanager
def activations(
    model: ir.Model, name: str, samples: Samples, wanted: Sequence[str]
) -> Iterator[Iterator[dict[str, Array]]]:
    """Run a model on samples, one after another, and give the values of some of its inputs and tensors.

    They are those of the main graph. NaN in one of them is an `InputError`, which has the ``name``
    of the model.
    """
    given = {str(value.name): value.const_value for value in model.graph.inputs}
    known = [tensor for tensor in wanted if tensor in given]
    defaults = {
        tensor: default.numpy() for tensor in known if (default := given[tensor]) is not None
    }
    computed = [tensor for tensor in wanted if tensor not in given]

    def read(run: Callable[[Mapping[str, Array]], dict[str, Array]]) -> Iterator[dict[str, Array]]:
        for number, arrays in enumerate(samples):
            found = (
                defaults
                | {tensor: arrays[tensor] for tensor in known if tensor in arrays}
                | run(arrays)
            )
            for tensor in nan_in(found):
                raise InputError(
                    f"data, run {number}: {name} computes NaN in {tensor!r}; its range is not known"
                )
            yield found

    opened: Any = (
        Runner(model, name, SessionSettings()).opened(computed)
        if computed
        else nullcontext(lambda _: {})
    )
    with opened as run:
        yield read(run)


def named(node: ir.Node) -> str:
    """A node in words, with its modules."""
    owners = ", ".join(repr(path or "(root)") for path in tags.owners_of(node.metadata_props))
    return (
        f"{node.op_type} {node.name!r} of {owners}" if owners else f"{node.op_type} {node.name!r}"
    )


_SLACK = 1e-9  # rounding errors of differences between metrics


def is_packed(kind: ir.TypeProtocol | None) -> bool:
    """Whether a type is that of a sequence, an optional or a map."""
    return kind is not None and not isinstance(kind, ir.TensorType | ir.SparseTensorType)


@dataclass(frozen=True)
class Facts:
    """What methods ask of a model before anything is done to it.

    Attributes:
        graph: The main graph.
        opset: The version of ONNX's operators.
        dtypes: Tensor → its element type, None if it is not known.
        packed: Values that are no tensors: sequences, optionals and maps.
    """

    graph: ir.Graph
    opset: int
    dtypes: Mapping[ir.Value, ir.DataType | None]
    packed: frozenset[ir.Value]

    @classmethod
    def of(cls, tagged: TaggedModel) -> Facts:
        """The facts of a model."""
        graph, types = tagged.model.graph, tagged.inferred
        values = (
            value
            for node in tagged.nodes
            for value in (*node.inputs, *node.outputs)
            if value is not None
        )
        known = {value: types.type(value) for value in values}
        dtypes = {
            value: types.dtype(value)
            for value, kind in known.items()
            if isinstance(kind, ir.TensorType)
        }
        packed = frozenset(value for value, kind in known.items() if is_packed(kind))
        return cls(graph, graph.opset_imports.get("", 1), dtypes, packed)

    def has_floats(self, node: ir.Node) -> bool:
        """Whether the first input and the first output of a node are tensors of 32-bit floats."""
        values = [value for value in (*node.inputs[:1], *node.outputs[:1]) if value is not None]
        return bool(values) and all(self.dtypes.get(value) == ir.DataType.FLOAT for value in values)

    def dequantized(self, node: ir.Node) -> list[ir.Value | None]:
        """What the floats that a node reads are dequantized from; none if it reads others, too, besides a bias."""
        read = [
            value
            for value in node.inputs[:2]
            if value is not None and self.dtypes.get(value) == ir.DataType.FLOAT
        ]
        makers = [
            maker
            for value in read
            if (maker := value.producer()) is not None and dequantizes(maker)
        ]
        return [maker.inputs[0] for maker in makers] if len(makers) == len(read) else []

    def is_static(self, node: ir.Node) -> bool:
        """Whether a node has ranges measured ahead: all floats that it reads and makes are integers in between."""
        if not self.dequantized(node) or node.outputs[0].is_graph_output():
            return False
        readers = [use.node for use in node.outputs[0].uses()]
        return bool(readers) and all(map(quantizes, readers))


@dataclass(frozen=True)
class Validation:
    """A metric, of which larger is better, on validation data; ``name`` is that of the model in errors."""

    metric: Metric
    samples: Samples
    original: ir.Model
    name: str

    @cached_property
    def feeds(self) -> Sequence[dict[str, Array]]:
        """The inputs of each run."""
        return [dict(run) for run in self.samples]

    @cached_property
    def before(self) -> float:
        """The metric of the model as it was."""
        return self.of(self.original)

    def of(self, model: ir.Model) -> float:
        """The metric of a model."""
        return measured_metric(self.metric, model, self.name, self.feeds)

    def with_part(self, model: ir.Model, part: Submodel, made: onnx.ModelProto) -> float:
        """The metric of a model with what a tool made of a part of it; the model is not changed."""
        copy = model.clone()
        put_back(copy, in_copy(part, model, copy), model_from_proto(made), Names(copy))
        return self.of(copy)

    def budget(self, model: ir.Model, max_drop: float, name: str) -> float:
        """What is left of the drop that a precision allows after earlier ones; an InputError if nothing is."""
        left = max_drop - (self.before - self.of(model))
        if left < -_SLACK:
            raise InputError(
                f"{self._fall(self.of(model))} before {name!r} with max_drop is applied"
            )
        return max(left, 0.0)

    def check(self, model: ir.Model, max_drop: float | None) -> float:
        """The metric of the model with the whole plan, by which it may fall by ``max_drop`` at most."""
        after = self.of(model)
        if max_drop is not None and not self.before - after <= max_drop + _SLACK:
            raise InputError(
                f"{self._fall(after)} with the whole plan, and max_drop is {max_drop:g}"
            )
        return after

    def _fall(self, after: float) -> str:
        return f"the metric falls from {self.before:g} to {after:g}"


@dataclass(frozen=True)
class Left:
    """A node that a plan gives a precision, and that stays as it is.

    Attributes:
        node: The node of the model as it was.
        why: The reason.
        partly: Whether only an input of the node stays.
        failure: The error of the tool, if that is the reason.
    """

    node: ir.Node
    why: str
    partly: bool = False
    failure: Exception | None = None


@dataclass(frozen=True)
class Work:
    """A model that changes, and what it was.

    Attributes:
        changed: The model that changes.
        original: The model as it was; ranges are measured on it.
        facts: Of the model as it was.
        twins: Node of the model that changes → what it is in the model as it was.
        planned: Node of the model that changes → the precision that the plan gives it.
        samples: The user's data, or random inputs.
        name: Name of the model in errors.
        validation: The user's metric; None without one.
    """

    changed: TaggedModel
    original: TaggedModel
    facts: Facts
    twins: Mapping[ir.Node, ir.Node]
    planned: Mapping[ir.Node, object]
    samples: Samples
    name: str
    validation: Validation | None

    @property
    def model(self) -> ir.Model:
        """The model that changes."""
        return self.changed.model

    @cached_property
    def names(self) -> Names:
        """Its names."""
        return Names(self.model)

    def left(
        self, node: ir.Node, why: str, *, partly: bool = False, failure: Exception | None = None
    ) -> Left:
        """What stays as it is of a node of the model that changes."""
        return Left(self.twins[node], why, partly, failure)

    def cut_out(self, nodes: Sequence[ir.Node]) -> Submodel:
        """Nodes of it as a model of their own."""
        return cut_out(self.model, nodes, self.changed.inferred)

    def put_back(self, part: Submodel, made: ir.Model) -> None:
        """Replace the nodes of a part by what was made of it."""
        put_back(self.model, part, made, self.names)
        remove_unused(part.weights.values())

    @contextmanager
    def runs(self, part: Submodel) -> Iterator[Iterator[dict[str, Array]]]:
        """The inputs of a part, by their names inside it, in each run of the data."""
        in_whole = {name: str(value.name) for name, value in part.inputs.items()}
        with activations(
            self.original.model, self.name, self.samples, list(in_whole.values())
        ) as found:
            yield ({name: arrays[whole] for name, whole in in_whole.items()} for arrays in found)
