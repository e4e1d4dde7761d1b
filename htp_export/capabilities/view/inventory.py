"""Modules, nodes and tags of a model as plain data, for drawings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.files.model_files import has_external_data
from htp_export.format import tags
from htp_export.format.recipes import recipe_in_words
from htp_export.format.torch_metadata import SourceLine, source_of
from htp_export.model.module_facts import (
    ModuleContents,
    ModuleFacts,
    contents_of,
    dtype_name,
    elements_of,
    stored_tensor,
    tied_parameters,
)
from htp_export.model.recipes import recipe_of
from htp_export.model.regions import Region
from htp_export.model.tagged import TaggedModel
from htp_export.reporting.tag_facts import TagFacts
from htp_export.shapes.operator_kinds import operator_of

_AT_ONCE = 1 << 20  # elements that are converted to float64 at a time: 8 MB
_NOT_NUMBERS = (
    ir.DataType.STRING,
    ir.DataType.COMPLEX64,
    ir.DataType.COMPLEX128,
    ir.DataType.UNDEFINED,
)


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of one tensor.

    Mean, standard deviation (of the whole population) and range refer to its finite values; 0 if
    there are none. ``zeros`` and ``not_finite`` (NaN and infinite) are counts.
    """

    elements: int
    mean: float
    std: float
    least: float
    most: float
    zeros: int
    not_finite: int


def weight_statistics(
    model: ir.Model, constants: Iterable[ir.Value] = ()
) -> dict[str, WeightStatistics]:
    """Stored tensor → statistics of its numbers; quantized ones as stored. Reads every weight.

    The tensors are the initializers, and ``constants``: weights in ``Constant`` nodes.
    """
    statistics: dict[str, WeightStatistics] = {}
    initializers = [value for graph in model.graphs() for value in graph.initializers.values()]
    for value in (*initializers, *constants):
        name = str(value.name)
        tensor = stored_tensor(value)
        if tensor is None or tensor.dtype in _NOT_NUMBERS or name in statistics:
            continue
        try:
            statistics[name] = _statistics(tensor)
        except (OSError, ValueError) as error:  # the data file is missing, or too short
            raise InputError(
                f"the values of the weight {name!r} cannot be read: {error}"
            ) from error
    return statistics


def _statistics(tensor: ir.TensorProtocol) -> WeightStatistics:
    """Compute the statistics in parts, so that one part at a time is converted to float64.

    Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979.
    """
    count, mean, squares = 0, 0.0, 0.0
    least = math.inf
    most = -math.inf
    zeros = 0
    not_finite = 0
    values = tensor.numpy().reshape(-1)
    for start in range(0, values.size, _AT_ONCE):
        part = values[start : start + _AT_ONCE].astype(np.float64)
        finite = part[np.isfinite(part)]
        not_finite += part.size - finite.size
        if not finite.size:
            continue
        part_mean = float(finite.mean())
        difference = part_mean - mean
        total = count + finite.size
        part_squares = float(((finite - part_mean) ** 2).sum())
        squares += part_squares + difference * difference * count * finite.size / total
        mean += difference * finite.size / total
        count = total
        least = min(least, float(finite.min()))
        most = max(most, float(finite.max()))
        zeros += int(finite.size - np.count_nonzero(finite))
    if not count:
        return WeightStatistics(tensor.size, mean, 0.0, 0.0, 0.0, zeros, not_finite)
    std = math.sqrt(squares / count)
    return WeightStatistics(tensor.size, mean, std, least, most, zeros, not_finite)


_LONGEST = 400  # characters of an attribute or a constant: more do not fit beside a node
_SMALL = 16  # elements of a constant whose values are kept, such as a shape


class Link(NamedTuple):
    """An input of a node: tensor (``""`` if absent), position of its producer, and output index.

    Inputs of the model and weights have no producer.
    """

    tensor: str
    node: int | None = None
    output: int = 0


@dataclass(frozen=True)
class TensorEntry:
    """A tensor; type as in ``float32[batch, 16, 768]``, value of a small one: ``[1, 12, -1]``."""

    name: str
    type: str = ""
    value: str = ""


@dataclass(frozen=True)
class NodeEntry:
    """One node, with the tags in its file; ``""`` if they are absent.

    ``module`` is the owner, or the deepest common ancestor of all owners. ``inputs`` are followed
    by the outputs of subgraphs. ``parameters`` counts the elements of the weights that it uses.
    """

    name: str
    operator: str
    owners: tuple[str, ...] = ()
    reason: str = ""
    call: str = ""
    module: str = ""
    inputs: tuple[Link, ...] = ()
    outputs: tuple[TensorEntry, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    parameters: int = 0
    source: SourceLine | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleEntry(ModuleFacts):
    """One module. ``own_nodes`` are positions in ``Inventory.nodes``, without descendants' nodes.

    ``tied`` maps parameters that an earlier module owns, too, to their full names there;
    ``counted_parameters`` and ``counted_bytes`` exclude them, so that siblings add up. ``source``
    are the lines of its ``forward``, ``modeling_bert.py:140-172``; ``failure`` is the reason why it
    could not be exported.
    """

    own_nodes: tuple[int, ...] = ()
    operators: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)
    weights: tuple[TensorEntry, ...] = ()
    inputs: tuple[TensorEntry, ...] = ()
    outputs: tuple[TensorEntry, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    counted_parameters: int = 0
    counted_bytes: int = 0
    source: str = ""
    failure: str = ""


@dataclass(frozen=True)
class Inventory:
    """A model for a drawing: modules in the order of ``named_modules()``, or the root alone.

    Nodes of subgraphs follow the node that contains them. ``called`` are the modules that ran; only
    these are layers of a drawing. ``parameters`` maps stored tensors to the parameters that they
    were computed of, in words, ``lm_head.weight, transposed``, unless that is their name.
    """

    name: str
    tags: TagFacts
    modules: Mapping[str, ModuleEntry]
    nodes: tuple[NodeEntry, ...]
    called: frozenset[str]
    producer: str
    opsets: Mapping[str, int]
    external_data: bool
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]
    constants: tuple[TensorEntry, ...]
    statistics: Mapping[str, WeightStatistics]
    notes: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def spaces(self) -> Mapping[str, str]:
        """Module path → its layer."""
        return {path: tags.namespace(path, self.called) for path in self.modules}


def take_inventory(tagged: TaggedModel, name: str = "", statistics: bool = False) -> Inventory:
    """Collect all data of a drawing; its default name is the name of the graph.

    Weights are loaded for statistics only. A model without tags is one module, the root, which owns
    every node.
    """
    contents = contents_of(tagged).modules
    reader = _Reader(tagged, contents)
    model = tagged.model
    initializers = [value for graph in model.graphs() for value in graph.initializers.values()]
    return Inventory(
        name=name or model.graph.name or "model",
        tags=tagged.tag_facts,
        modules={path: reader.module(content) for path, content in contents.items()},
        nodes=reader.nodes,
        called=tagged.hierarchy.called,
        producer=" ".join(filter(None, (model.producer_name, model.producer_version))),
        opsets={domain or "ai.onnx": version for domain, version in model.opset_imports.items()},
        external_data=has_external_data(model),
        inputs=reader.tensors(model.graph.inputs),
        outputs=reader.tensors(model.graph.outputs),
        constants=reader.tensors(initializers),
        statistics=weight_statistics(model, reader.weights_of_nodes) if statistics else {},
        parameters=_parameters_in_words(initializers),
    )


def _parameters_in_words(initializers: Iterable[ir.Value]) -> dict[str, str]:
    """Stored tensor → its parameters in words, if they are recorded and are not its name."""
    words = {}
    for value in initializers:
        tensor = value.const_value
        if tensor is None or tags.RECIPE not in tensor.metadata_props:
            continue
        try:
            text = recipe_in_words(recipe_of(value))
        except InputError as error:  # the page shows the rest of the file
            text = f"unknown parameter: {error}"
        if text not in (value.name, "a constant"):
            words[str(value.name)] = _shortened(text)
    return words


class _Reader:
    """Collects the entries of nodes, modules and tensors of one model."""

    def __init__(self, tagged: TaggedModel, contents: Mapping[str, ModuleContents]) -> None:
        self._tagged = tagged
        self._tied = tied_parameters(tagged)
        self._weights: dict[ir.Value, None] = {}
        for content in contents.values():
            self._weights.update(dict.fromkeys(content.own_weights))
        self.weights_of_nodes = [
            weight for weight in self._weights if weight.producer() is not None
        ]
        self._parameters = Counter[str | None]()
        self._bytes = Counter[str | None]()
        # The path of a parent is shorter: children come first.
        for path in sorted(contents, key=len, reverse=True):
            facts = contents[path].facts
            parent = tagged.hierarchy.parent(path)
            self._parameters[path] += facts.self_parameters
            self._parameters[parent] += self._parameters[path]
            self._bytes[path] += facts.self_weight_bytes
            self._bytes[parent] += self._bytes[path]
        self._place = tagged.index.place
        self.nodes = tuple(map(self._node, tagged.nodes))
        self._operators = tagged.index.counts(operator_of)
        self._reasons = tagged.index.counts(lambda node: self.nodes[self._place[node]].reason)

    def module(self, contents: ModuleContents) -> ModuleEntry:
        """The entry of a module."""
        path = contents.facts.path
        own_places = tuple(self._place[node] for node in contents.own_nodes)
        tagged = self._tagged
        ends: Region | ir.Graph = tagged.model.graph if tagged.source == "none" else tagged[path]
        return ModuleEntry(
            **vars(contents.facts),
            own_nodes=own_places,
            operators=self._operators.get(path, {}),
            reasons=self._reasons.get(path, {}),
            weights=self.tensors(contents.own_weights),
            inputs=self.tensors(ends.inputs),
            outputs=self.tensors(ends.outputs),
            tied=self._tied.get(path, {}),
            counted_parameters=self._parameters[path],
            counted_bytes=self._bytes[path],
            source=_lines_of_most([self.nodes[position] for position in own_places]),
        )

    def tensors(self, values: Sequence[ir.Value]) -> tuple[TensorEntry, ...]:
        """Tensors with their types, inferred if the file does not state them."""
        return tuple(map(self._tensor, values))

    def _tensor(self, value: ir.Value) -> TensorEntry:
        is_typed = value.const_value is not None or (
            value.dtype is not None and value.shape is not None
        )
        text = _type_text(value if is_typed else self._tagged.inferred.described(value))
        return TensorEntry(value.name or "", text, _value_text(value.const_value))

    def _node(self, node: ir.Node) -> NodeEntry:
        """The entry of a node."""
        owners = self._tagged.owners_of(node)
        known = node.metadata_props if self._tagged.source == "htp" else {}
        weights = {value for value in node.inputs if value is not None and value in self._weights}
        return NodeEntry(
            name=node.name or "",
            operator=operator_of(node),
            owners=owners,
            reason=known.get(tags.REASON, ""),
            call=known.get(tags.CALL, ""),
            module=tags.common_ancestor(owners),
            inputs=tuple(self._links(node)),
            outputs=self.tensors(node.outputs),
            attributes={name: _attribute_text(attr) for name, attr in node.attributes.items()},
            parameters=sum(map(elements_of, weights)),
            source=source_of(node),
        )

    def _links(self, node: ir.Node) -> Iterator[Link]:
        for value in node.inputs:
            yield Link("") if value is None else self._link(value)
        for body in self._tagged.index.bodies.get(node, ()):
            yield from map(self._link, body.outputs)

    def _link(self, value: ir.Value) -> Link:
        """The link to a tensor; for an input of a loop's body, to the argument of the loop."""
        name = value.name or ""
        seen = {value}
        while True:
            producer = value.producer()
            if producer is not None:
                return Link(name, self._place.get(producer), value.index() or 0)
            holders = self._tagged.index.holders(value.graph) if value.is_graph_input() else ()
            if len(holders) != 1 or value.graph is None:
                return Link(name)
            # Loop and Scan have the inputs of their body, in the same order.
            position = next(k for k, formal in enumerate(value.graph.inputs) if formal is value)
            argument = holders[0].inputs[position] if position < len(holders[0].inputs) else None
            if argument is None or argument in seen:
                return Link(name)
            value = argument
            seen.add(value)


def _lines_of_most(nodes: Sequence[NodeEntry]) -> str:
    """The source file of most of the nodes, with first and last line; ``""`` if none has one."""
    lines: dict[str, list[int]] = {}
    for node in nodes:
        if node.source is not None:
            lines.setdefault(node.source.file, []).append(node.source.line)
    if not lines:
        return ""
    file = max(lines, key=lambda name: len(lines[name]))
    first = min(lines[file])
    last = max(lines[file])
    if first == last:
        return f"{file}:{first}"
    return f"{file}:{first}-{last}"


def _type_text(value: ir.Value) -> str:
    """The type as in ``float32[batch, 16, 768]``; ``""`` if it is unknown."""
    if value.type is None and value.const_value is None:
        return ""
    dtype = value.dtype if value.dtype is not None else getattr(value.const_value, "dtype", None)
    name = dtype_name(dtype) if dtype else str(value.type)  # UNDEFINED is 0, and false
    shape = value.shape if value.shape is not None else getattr(value.const_value, "shape", None)
    if shape is None:
        return name
    dims = (dim if isinstance(dim, int) else dim.value for dim in shape)
    return f"{name}[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def _attribute_text(attribute: ir.Attr) -> str:
    if attribute.type == ir.AttributeType.GRAPH:
        return f"graph of {sum(1 for _ in attribute.as_graph().all_nodes())} nodes"
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        text = f"{dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape.numpy()))}]"
        value = _value_text(tensor)
        return f"{text} = {value}" if value else text
    return _shortened(str(attribute.value))


def _value_text(tensor: ir.TensorProtocol | None) -> str:
    """The values of a small tensor; ``""`` for a larger one, and for external data."""
    if tensor is None or tensor.size > _SMALL or isinstance(tensor, ir.ExternalTensor):
        return ""
    return _shortened(str(tensor.numpy().tolist()))


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return text[: _LONGEST - 1] + "…"
