"""The stored tensors that a node reads: directly, through operators that only move numbers, and in functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from htp_export.format import tags
from htp_export.model.module_facts import stored_tensor
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import IN_PLACE, LAYOUT, RESHAPING, is_standard

_WORDS = {
    "Transpose": "transposed",
    "Expand": "repeated",
    "Cast": "cast",
    "CastLike": "cast",
    "QuantizeLinear": "quantized",
    "DequantizeLinear": "dequantized",
    **dict.fromkeys(RESHAPING, "reshaped"),
}


@dataclass(frozen=True)
class WeightSource:
    """A stored tensor that a value has its numbers from.

    Attributes:
        tensor: The initializer, or the output of a ``Constant``.
        steps: The nodes on the way, the first one reads the tensor.
        within: The modules of the calls of functions that it was passed to, the outermost first.
    """

    tensor: ir.Value
    steps: tuple[ir.Node, ...] = ()
    within: tuple[str, ...] = ()

    @property
    def how(self) -> tuple[str, ...]:
        """What was done to it on the way, a word for each operator that does anything."""
        return tuple(_WORDS[step.op_type] for step in self.steps if step.op_type in _WORDS)


class WeightSources:
    """What the values of one model have their numbers from.

    A value that is computed of several tensors has no source. An argument of a function has one for each call of it.

    Args:
        tagged: The model.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged
        self._known: dict[ir.Value, tuple[WeightSource, ...]] = {}
        self._positions: dict[ir.Graph, dict[ir.Value, int]] = {}

    def calls_function(self, node: ir.Node) -> bool:
        """Whether a node calls a function of the model: then the nodes of the function read its arguments."""
        return node.op_identifier() in self._tagged.model.functions

    def read_by(self, node: ir.Node) -> Iterator[tuple[int, WeightSource]]:
        """The position of each input of a node that has sources, and each of its sources."""
        for position, value in enumerate(node.inputs):
            if value is not None:
                yield from ((position, source) for source in self.of(value))

    def of(self, value: ir.Value) -> tuple[WeightSource, ...]:
        """The sources of a value; none if it is computed, or an input of the model."""
        chain: list[tuple[ir.Value, ir.Node]] = []
        while value not in self._known:
            producer = value.producer()
            moved = None if producer is None else _moved(producer)
            if producer is None or moved is None:
                self._known[value] = self._ends(value)
                break
            chain.append((value, producer))
            value = moved
        sources = self._known[value]
        for later, step in reversed(chain):
            sources = tuple(replace(source, steps=(*source.steps, step)) for source in sources)
            self._known[later] = sources
        return sources

    def _ends(self, value: ir.Value) -> tuple[WeightSource, ...]:
        if value.is_initializer() or is_standard(value.producer(), "Constant"):
            return (WeightSource(value),) if stored_tensor(value) is not None else ()
        if not value.is_graph_input() or value.graph is None or value.graph not in self._tagged.index.calls:
            return ()
        self._known[value] = ()  # a function that calls itself: no valid model, but files come from anywhere
        formals = self._positions.setdefault(value.graph, {formal: k for k, formal in enumerate(value.graph.inputs)})
        return tuple(self._passed(self._tagged.index.calls[value.graph], formals[value]))

    def _passed(self, calls: Sequence[ir.Node], position: int) -> Iterator[WeightSource]:
        for call in calls:
            argument = call.inputs[position] if position < len(call.inputs) else None
            owners = self._tagged.owners_of(call)
            for source in self.of(argument) if argument is not None else ():
                module = tags.common_ancestor(owners_within(owners, source.within))
                yield replace(source, within=(*source.within, module))


def _moved(node: ir.Node) -> ir.Value | None:
    """The input whose numbers an operator only moves; None for other operators."""
    is_moving = is_standard(node) and (node.op_type in LAYOUT or node.op_type in IN_PLACE)
    return node.inputs[0] if is_moving and node.inputs else None


def owners_within(owners: Sequence[str], within: Sequence[str]) -> tuple[str, ...]:
    """Of the owners of a function's node, those at or below the modules of its calls, the outermost first; or all.

    Examples:
        >>> owners_within(("layer.0.fc", "layer.1.fc"), ["layer.1"]), owners_within(("head",), ["layer.1"])
        (('layer.1.fc',), ('head',))
    """
    for module in within:
        owners = [owner for owner in owners if tags.is_under(owner, module)] or owners
    return tuple(owners)
