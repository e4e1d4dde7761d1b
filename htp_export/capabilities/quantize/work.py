"""The state of methods: the original and the changed model, data, and a metric."""

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
from htp_export.runtime.data import Run, arrays_of
from htp_export.runtime.generating import Decoder
from htp_export.runtime.inputs import Feed
from htp_export.runtime.runner import Metric, Runner, measured_metric
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import DEFAULTS, RunSettings
from htp_export.shapes.operator_kinds import dequantizes, quantizes


@dataclass(frozen=True)
class CalibrationData(Samples):
    """The inputs of runs; NaN in them is an error.

    For a ``decoder`` with a key-value cache, a run with token ids alone is a prompt with an empty
    cache.
    """

    decoder: Decoder | None = None

    @classmethod
    def of(cls, settings: RunSettings, model: ir.Model, *, passes: int = 1) -> CalibrationData:
        """The runs of a user's data; see `Samples.of`."""
        samples = super().of(settings, model, passes=passes)
        assert isinstance(samples, cls)
        try:
            return replace(samples, decoder=Decoder.of(model))
        except InputError:  # the model is no decoder
            return samples

    def _feed(self, run: Run, name: str) -> Feed:
        if self.decoder is None or len(list(self.inputs)) < 2:
            return super()._feed(run, name)
        name = os.fspath(run) if isinstance(run, str | os.PathLike) else name
        run = arrays_of(run)
        prompt_names = {value.name for value in self.decoder.of_prompts}
        if isinstance(run, Mapping) and run.keys() == prompt_names:
            prompts = replace(self, inputs=self.decoder.of_prompts)
            [ids] = prompts._feed(run, name).arrays.values()
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
    """Run a model on samples, one after another, and yield the wanted tensors of each run.

    Args:
        model: The model.
        name: Its name in errors.
        samples: The inputs of each run.
        wanted: Names of inputs and tensors of the main graph.

    Raises:
        InputError: A tensor has NaN.
    """
    defaults: dict[str, Array] = {}  # of inputs that a run may leave out
    inputs: set[str] = set()
    names = frozenset(wanted)
    for value in model.graph.inputs:
        inputs.add(str(value.name))
        if value.const_value is not None and value.name in names:
            defaults[str(value.name)] = value.const_value.numpy()
    computed = [tensor for tensor in wanted if tensor not in inputs]
    passed = [tensor for tensor in wanted if tensor in inputs]

    def read(run: Callable[[Mapping[str, Array]], dict[str, Array]]) -> Iterator[dict[str, Array]]:
        for number, arrays in enumerate(samples):
            fed = {tensor: arrays[tensor] for tensor in passed if tensor in arrays}
            tensors = {**defaults, **fed, **run(arrays)}
            for tensor in nan_in(tensors):
                raise InputError(
                    f"data, run {number}: {name} computes NaN in {tensor!r}; its range is not known"
                )
            yield tensors

    opened: Any = nullcontext(lambda _: {})
    if computed:
        opened = Runner(model, name, DEFAULTS).opened(computed)
    with opened as run:
        yield read(run)


def named(node: ir.Node) -> str:
    """Describe a node for a message: operator, name and modules."""
    owners = ", ".join(repr(path or "(root)") for path in tags.owners_of(node.metadata_props))
    node_name = f"{node.op_type} {node.name!r}"
    return f"{node_name} of {owners}" if owners else node_name


_SLACK = 1e-9
"""Rounding error of the difference of two metrics, by which a drop may exceed ``max_drop``."""


def is_packed(kind: ir.TypeProtocol | None) -> bool:
    """Whether a type is that of a sequence, an optional or a map."""
    return kind is not None and not isinstance(kind, ir.TensorType | ir.SparseTensorType)


@dataclass(frozen=True)
class Facts:
    """Types of the tensors of a model before it is changed.

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
        dtypes: dict[ir.Value, ir.DataType | None] = {}
        packed: set[ir.Value] = set()
        for node in tagged.nodes:
            for value in (*node.inputs, *node.outputs):
                if value is None or value in dtypes or value in packed:
                    continue
                kind = types.type(value)
                if isinstance(kind, ir.TensorType):
                    dtypes[value] = types.dtype(value)
                elif is_packed(kind):
                    packed.add(value)
        return cls(graph, graph.opset_imports.get("", 1), dtypes, frozenset(packed))

    def has_floats(self, node: ir.Node) -> bool:
        """Whether the first input and the first output of a node are tensors of 32-bit floats."""
        values = [value for value in (*node.inputs[:1], *node.outputs[:1]) if value is not None]
        return bool(values) and all(self.dtypes.get(value) == ir.DataType.FLOAT for value in values)

    def dequantized(self, node: ir.Node) -> list[ir.Value | None]:
        """The quantized counterparts of the float factors of a node; empty if one has none.

        A bias, the third input, is ignored.
        """
        sources: list[ir.Value | None] = []
        for value in node.inputs[:2]:
            if value is None or self.dtypes.get(value) != ir.DataType.FLOAT:
                continue
            producer = value.producer()
            if producer is None or not dequantizes(producer):
                return []
            sources.append(producer.inputs[0])
        return sources

    def is_static(self, node: ir.Node) -> bool:
        """Whether a node is between DequantizeLinear and QuantizeLinear: with measured ranges."""
        if not self.dequantized(node) or node.outputs[0].is_graph_output():
            return False
        consumers = [use.node for use in node.outputs[0].uses()]
        return bool(consumers) and all(map(quantizes, consumers))


@dataclass(frozen=True)
class Validation:
    """A metric on validation data, larger is better; ``name`` is the model in errors."""

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
        """The metric of the original model."""
        return self.of(self.original)

    def of(self, model: ir.Model) -> float:
        """The metric of a model."""
        return measured_metric(self.metric, model, self.name, self.feeds)

    def with_part(self, model: ir.Model, part: Submodel, made: onnx.ModelProto) -> float:
        """The metric of a copy of a model in which a part is replaced by the output of a tool."""
        copy = model.clone()
        put_back(copy, in_copy(part, model, copy), model_from_proto(made), Names(copy))
        return self.of(copy)

    def budget(self, model: ir.Model, max_drop: float, name: str) -> float:
        """The drop that earlier precisions left of ``max_drop``; an `InputError` for none."""
        left = max_drop - (self.before - self.of(model))
        if left < -_SLACK:
            raise InputError(
                f"{self._fall(self.of(model))} before {name!r} with max_drop is applied"
            )
        return max(left, 0.0)

    def check(self, model: ir.Model, max_drop: float | None) -> float:
        """The metric with the whole plan; an `InputError` if it fell by more than ``max_drop``."""
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
    """A node that was left unchanged although the plan assigns a precision to it.

    Attributes:
        node: The node of the original model.
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
    """The model that is changed, the original, and the data.

    Attributes:
        changed: The model that is changed.
        original: The original; ranges are measured on it.
        facts: Types of the tensors of the original.
        twins: Node of the changed model → its counterpart in the original.
        planned: Node of the changed model → its precision in the plan.
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
        """The model that is changed."""
        return self.changed.model

    @cached_property
    def names(self) -> Names:
        """The names of the changed model."""
        return Names(self.model)

    def left(
        self, node: ir.Node, why: str, *, partly: bool = False, failure: Exception | None = None
    ) -> Left:
        """The record of a node of the changed model that is left."""
        return Left(self.twins[node], why, partly, failure)

    def cut_out(self, nodes: Sequence[ir.Node]) -> Submodel:
        """A copy of nodes of the changed model, as a model of its own."""
        return cut_out(self.model, nodes, self.changed.inferred)

    def put_back(self, part: Submodel, made: ir.Model) -> None:
        """Replace the nodes of a part by the nodes of ``made``."""
        put_back(self.model, part, made, self.names)
        remove_unused(part.weights.values())

    @contextmanager
    def runs(self, part: Submodel) -> Iterator[Iterator[dict[str, Array]]]:
        """Open the inputs of a part in each run of the data; names are those in the part."""
        in_whole = {name: str(value.name) for name, value in part.inputs.items()}

        def renamed(arrays: Mapping[str, Array]) -> dict[str, Array]:
            return {name: arrays[whole] for name, whole in in_whole.items()}

        wanted = list(in_whole.values())
        with activations(self.original.model, self.name, self.samples, wanted) as tensors:
            yield map(renamed, tensors)
