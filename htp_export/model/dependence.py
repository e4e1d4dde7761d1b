"""Which values depend on the values of the inputs: one walk, over the nodes of a file or over captured operations.

A value depends on an input if its numbers can change when the numbers of the input do. Four rules:

- What a node computes depends on whatever the node reads, and on whatever its subgraphs read around them.
- ``Shape`` and ``Size`` read sizes: what they give depends on no values, of whatever tensor. ``CastLike`` reads the
  type of its second input, and not its values.
- The inputs of a subgraph are given by its node, and depend on what the node reads.
- The inputs of a function are given by any of its calls: they are starts, as the inputs of the model are.

Random operators depend on no input by these rules; what is the same in every run, ``GraphIndex.constant`` says.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import onnx_ir as ir

from htp_export.shapes.operator_kinds import SIZES_ONLY, is_standard, operator_of, subgraphs, values_read

_Key = TypeVar("_Key", bound=Hashable)


def dependence(steps: Iterable[tuple[Iterable[_Key], Iterable[_Key]]], starts: Mapping[_Key, int]) -> dict[_Key, int]:
    """Each value that depends on a start, itself included → the bits of those starts.

    Args:
        steps: What each node reads and makes, in an order in which it can run; without those that read sizes alone.
        starts: Where to start → a bit, or several.

    Examples:
        >>> steps = [(("x", "w"), ("h",)), (("w",), ("v",)), (("h", "y"), ("z",))]
        >>> dependence(steps, {"x": 1, "y": 2})
        {'x': 1, 'y': 2, 'h': 1, 'z': 3}
    """
    bits_of = dict(starts)
    for reads, results in steps:
        bits = 0
        for key in reads:
            bits |= bits_of.get(key, 0)
        if bits:
            for key in results:
                bits_of[key] = bits
    return bits_of


def reads_and_results(nodes: Iterable[ir.Node]) -> Iterator[tuple[Sequence[ir.Value | None], Sequence[ir.Value]]]:
    """What nodes read the values of, and what these go into; nodes in subgraphs come after the one that holds them."""
    for node in nodes:
        if is_standard(node, *SIZES_ONLY):
            continue
        bodies = subgraphs(node)
        if not bodies:
            yield _values_of(node), node.outputs
            continue
        reads = [*node.inputs]
        for body in bodies:
            reads.extend(body.outputs)
            for inner in body.all_nodes():
                reads.extend(() if is_standard(inner, *SIZES_ONLY) else _values_of(inner))
                reads.extend(value for deeper in subgraphs(inner) for value in deeper.outputs)
        yield reads, (*node.outputs, *(value for body in bodies for value in body.inputs))


def _values_of(node: ir.Node) -> Sequence[ir.Value | None]:
    return values_read(operator_of(node), node.inputs)


def given_values(model: ir.Model) -> Mapping[ir.Value | None, int]:
    """Where dependence starts in a model: its inputs, and those of its functions."""
    starts = [value for value in model.graph.inputs if not value.is_initializer()]
    for function in model.functions.values():
        starts.extend(function.inputs)
    return dict.fromkeys(starts, 1)


def input_dependent_values(model: ir.Model, nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """The values that depend on values of the model's inputs, not on their sizes alone.

    ``nodes`` are those of the model, as of ``all_nodes``.

    Examples:
        >>> x = ir.val("x")
        >>> size, double = ir.node("Shape", [x]), ir.node("Add", [x, x])
        >>> graph = ir.Graph([x], [], nodes=[size, double], opset_imports={"": 20})
        >>> found = input_dependent_values(ir.Model(graph, ir_version=10), graph)
        >>> [value in found for value in (x, *size.outputs, *double.outputs)]
        [True, False, True]
    """
    return {value for value in dependence(reads_and_results(nodes), given_values(model)) if value is not None}
