"""Tensors that go from one device to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.format.tags import common_ancestor
from htp_export.model.regions import all_nodes
from htp_export.shapes.operator_kinds import subgraphs

_MOST_NAMED = 2  # of consumers, in text


@dataclass(frozen=True)
class Crossing:
    """A tensor that is computed on one device and read on another; one that is read on two others crosses twice.

    Attributes:
        tensor: Its name; that of the graph that ONNX Runtime runs, in a result of ``placement``.
        bytes: Its size; None if its shape is unknown.
        source: The device or execution provider of its producer.
        target: That of its consumers.
        producer: Path of the module that computes it; None for an input of the model.
        consumers: Paths of the modules that read it; empty for an output of the model alone.
        copied: Whether ONNX Runtime copies it to other memory; None if it does not say.
    """

    tensor: str
    bytes: int | None
    source: str
    target: str
    producer: str | None
    consumers: tuple[str, ...]
    copied: bool | None = None

    def __str__(self) -> str:
        start = "an input" if self.producer is None else self.producer or "(root)"
        named = [path or "(root)" for path in self.consumers[:_MOST_NAMED]] or ["an output"]
        more = len(self.consumers) - _MOST_NAMED
        end = ", ".join(named) + (f" and {more} more" if more > 0 else "")
        size = "unknown size" if self.bytes is None else f"{self.bytes:,} bytes"
        return f"{self.tensor}: {size}, {start} ({self.source}) to {end} ({self.target})"


def _edges(model: ir.Model) -> Iterator[tuple[ir.Value, ir.Node | None, ir.Node | None]]:
    """Each tensor, its producer, None for an input of the model, and a consumer, None for an output.

    What a subgraph is given comes from the node that runs it, and what it returns goes there. Every device has the
    initializers and constants that it needs: they are left out.
    """
    holder = {body: node for node in all_nodes(model) for body in subgraphs(node)}

    def producer(value: ir.Value) -> tuple[bool, ir.Node | None]:
        node = value.producer()
        if node is not None:
            return node.op_type != "Constant", node
        given = value.is_graph_input() and not value.is_initializer()
        return given, None if value.graph is None else holder.get(value.graph)

    for node in model.graph.all_nodes():
        for value in dict.fromkeys(value for value in node.inputs if value is not None):
            counts, maker = producer(value)
            if counts:
                yield value, maker, node
    for graph in (model.graph, *holder):
        for value in graph.outputs:
            counts, maker = producer(value)
            if counts and maker is not holder.get(graph):
                yield value, maker, holder.get(graph)


def crossings(
    model: ir.Model,
    device_of: Callable[[ir.Node], str | None],
    owners_of: Callable[[ir.Node], tuple[str, ...]],
    sizes: Mapping[str, int],
    host: str,
    counts: Callable[[ir.Value], bool] = lambda value: True,
) -> tuple[Crossing, ...]:
    """The tensors between devices of a model without functions, in the order in which they are first read.

    Where the device of a node is unknown, nothing is said of its tensors. ``host`` has the inputs and takes the outputs
    of the model; ``sizes`` are bytes by name; tensors that do not ``counts`` are left out.
    """
    found: dict[tuple[ir.Value, str, str], tuple[ir.Node | None, dict[str, None]]] = {}
    for value, maker, reader in _edges(model):
        source = host if maker is None else device_of(maker)
        target = host if reader is None else device_of(reader)
        if source is None or target is None or source == target or not counts(value):
            continue
        _, consumers = found.setdefault((value, source, target), (maker, {}))
        if reader is not None:
            consumers[_module(owners_of(reader))] = None
    return tuple(
        Crossing(
            tensor=value.name or "",
            bytes=sizes.get(value.name or ""),
            source=source,
            target=target,
            producer=None if maker is None else _module(owners_of(maker)),
            consumers=tuple(consumers),
        )
        for (value, source, target), (maker, consumers) in found.items()
    )


def _module(owners: tuple[str, ...]) -> str:
    return common_ancestor(owners) if owners else ""
