"""Activations of a quantized model that adapters change: these lose their ranges, which were calibrated without one.

A ``QuantizeLinear`` saturates what lies outside of its range (ONNX, Operators.md), so that a change by an adapter would
reach the output of the model in part only. Weights stay quantized.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from htp_export.editing.editing import stand_in, take_place
from htp_export.editing.submodels import remove_unused
from htp_export.model.boundaries import dependence, reads_and_results
from htp_export.shapes.operator_kinds import is_standard

__all__ = ["release_ranges"]


def release_ranges(graph: ir.Graph, changed: Iterable[ir.Value], named: Collection[str]) -> int:
    """Take out the pairs of ``QuantizeLinear`` and ``DequantizeLinear`` that depend on values, in place; how many.

    Names of ``named`` are kept where a pair has one of them behind it, as those of results of modules.

    Examples:
        >>> x, scale = ir.val("x"), ir.Value(name="scale", const_value=ir.tensor(0.1))
        >>> steps = [ir.node("QuantizeLinear", [x, scale])]
        >>> steps += [ir.node("DequantizeLinear", [steps[0].outputs[0], scale])]
        >>> steps += [ir.node("Relu", steps[1].outputs)]
        >>> graph = ir.Graph([x], steps[2].outputs, nodes=steps, initializers=[scale], opset_imports={"": 20})
        >>> release_ranges(graph, [x], ()), [node.op_type for node in graph], list(graph.initializers)
        (1, ['Relu'], [])
    """
    count = 0
    starts: dict[ir.Value | None, int] = dict.fromkeys(changed, 1)
    depending = dependence(reads_and_results(graph), starts)
    for quantize in [node for node in graph if is_standard(node, "QuantizeLinear")]:
        [levels], before = quantize.outputs, quantize.inputs[0]
        readers = [use.node for use in levels.uses()]
        is_pair = readers and all(is_standard(node, "DequantizeLinear") for node in readers)
        if before is None or before not in depending or levels.is_graph_output() or not is_pair:
            continue
        for [after] in [node.outputs for node in readers]:
            if after.name in named and before.name not in named and not before.is_graph_input():
                take_place(after, before)
            elif not stand_in(after, before):
                continue
            remove_unused([after])
            count += 1
    return count
