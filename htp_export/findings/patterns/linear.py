"""Linear layers: products with a bias, and the three projections of attention."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import onnx_ir as ir

from htp_export.findings.finding import Match
from htp_export.model.graph_facts import GraphFacts

__all__ = ["matmul_adds", "projections"]


def matmul_adds(facts: GraphFacts) -> Iterator[Match]:
    """``MatMul`` and the ``Add`` of a constant bias; of matrices, and with dimensions before them."""
    for product in facts.nodes_of("MatMul"):
        found = _bias(facts, product)
        rank = facts.rank(product.inputs[0]) if found is not None else None
        if found is None or rank is None or facts.rank(product.inputs[1]) != 2:
            continue
        add, bias = found
        kind = "matmul_add_2d" if rank == 2 else "matmul_add_3d"
        yield Match(kind, (product, add), f"rank {rank}", _blocked(facts, product, bias))


def _bias(facts: GraphFacts, product: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The ``Add`` of a constant vector to a product."""
    for use in product.outputs[0].uses():
        added = facts.with_constant(use.node) if use.node.op_type == "Add" else None
        if added is not None and added[0] is product.outputs[0] and facts.rank(added[1]) in (0, 1, 2):
            return use.node, added[1]
    return None


def _blocked(facts: GraphFacts, product: ir.Node, bias: ir.Value) -> str:
    if facts.only_reader(product.outputs[0]) is None:
        return "the product without its bias is read, too"
    weight, added = facts.shape(product.inputs[1]), facts.shape(bias)
    if weight is None or added is None or added[-1:] not in ((1,), weight[-1:]):
        return "the bias does not fit the columns of the weight"
    if facts.rank(product.inputs[0]) != 2 and not facts.is_constant(product.inputs[1]):
        return "the weight is computed"
    return ""


def projections(facts: GraphFacts) -> Iterator[Match]:
    """Three products of one tensor with weights that fit one matrix: queries, keys and values.

    Their weights have the same shape; with grouped queries, those of the keys and values do.
    """
    readers: defaultdict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in facts.nodes_of("MatMul", "Gemm"):
        if node.inputs[0] is not None and facts.is_constant(node.inputs[1]) and facts.rank(node.inputs[1]) == 2:
            readers[node.inputs[0]].append(node)
    for nodes in readers.values():
        if len(nodes) != 3:
            continue
        shapes = [_weight_shape(facts, node) for node in nodes]
        (_, same), *rest = Counter(shapes).most_common()
        if same == 1 or (rest and not _grouped(shapes)):
            continue
        detail = "grouped queries, " if rest else ""
        detail += " ".join("x".join(map(str, shape)) for shape in shapes)
        yield Match("qkv_projections", tuple(nodes), detail, _unmerged(facts, nodes))


def _weight_shape(facts: GraphFacts, node: ir.Node) -> tuple[object, object]:
    """Rows and columns of a weight, as ``MatMul`` has it."""
    rows, columns = facts.shape(node.inputs[1]) or (None, None)
    turned = "transB" in node.attributes and node.attributes["transB"].as_int() == 1
    return (columns, rows) if turned else (rows, columns)


def _grouped(shapes: list[tuple[object, object]]) -> bool:
    """Whether two of three projections are equal, and the third a multiple of them."""
    counts = Counter(shapes)
    narrow = next((columns for (_, columns), count in counts.items() if count == 2), None)
    wide = next((columns for (_, columns), count in counts.items() if count == 1), None)
    rows = len({rows for rows, _ in counts}) == 1
    return rows and isinstance(narrow, int) and isinstance(wide, int) and wide > narrow > 0 and wide % narrow == 0


def _unmerged(facts: GraphFacts, nodes: list[ir.Node]) -> str:
    if any(node.op_type == "Gemm" for node in nodes):
        return "they are Gemm, not MatMul and Add"
    if any(facts.tagged.index.initializer(node.inputs[1]) is None for node in nodes if node.inputs[1] is not None):
        return "their weights are computed: fold constants first"
    biased = [_bias(facts, node) for node in nodes]
    if all(found is None for found in biased):
        return "they have no bias"
    if any(found is None for found in biased):
        return "not all of them have a bias"
    return ""
