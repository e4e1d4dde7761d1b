"""``inline``: functions dissolved into the graph that calls them, every node as it was before it went into one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.editing.flattening import flattened
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.model.model_faults import names_model_faults
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import HoldsModel, ModelSource, load
from htp_export.results.columns import many


@dataclass(frozen=True)
class Inlined(HoldsModel):
    """The result of `inline`.

    Attributes:
        model: The model without functions.
        functions: Identifier of each function, ``htp::BertLayer`` → number of its calls in the flat graph.
        nodes_before: Number of nodes before, those in functions once.
        nodes_after: Number of nodes after.
    """

    model: ir.Model = field(repr=False)
    functions: Mapping[str, int]
    nodes_before: int
    nodes_after: int

    @property
    def summary(self) -> str:
        """The result in one line."""
        if not self.functions:
            return f"there are no functions; {many(self.nodes_after, 'node')}"
        calls, nodes = many(sum(self.functions.values()), "call"), many(self.nodes_after, "node")
        return f"{calls} of {many(len(self.functions), 'function')} inlined: {nodes}"


@names_model_faults("model")
def inline(model: ModelSource, output: str | os.PathLike[str] | None = None, *, share_weights: bool = False) -> Inlined:
    """Inline the functions of a model; the result is a flat, tagged graph.

    In a model that ``functions`` wrote, every node gets its original name, owners and types. Nodes of other functions
    get unique names, and the tags of the call if they have none.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed. It needs
            no tags; weights are not read.
        output: The file to write.
        share_weights: Leave external weights in the data file of another model in the folder of ``output``: no copy.

    Returns:
        The flat model, and the functions that it had.

    Raises:
        FileError: A file cannot be read or written.
        InputError: A function cannot be inlined: it calls itself, needs another opset, or has graphs as attributes; or
            the flat graph is too large.

    Examples:
        >>> import onnx_ir as ir
        >>> relu = ir.node("Relu", [ir.val("a")])
        >>> body = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20})
        >>> call = ir.node("Act", [ir.val("x")], domain="net", metadata_props={"htp.module": "act"})
        >>> graph = ir.Graph(call.inputs, call.outputs, nodes=[call], opset_imports={"": 20, "net": 1})
        >>> function = ir.Function("net", "Act", graph=body, attributes=[])
        >>> result = inline(ir.Model(graph, ir_version=10, functions=[function]))
        >>> [(node.op_type, node.metadata_props["htp.module"]) for node in result.model.graph]
        [('Relu', 'act')]
        >>> print(result)
        1 call of 1 function inlined: 1 node
    """
    check_target(output)
    tagged = load(model)
    flat, calls = flattened(tagged)
    if output is not None:
        write_model(flat, output, share_weights=share_weights)
    before, after = (sum(1 for _ in all_nodes(each)) for each in (tagged.model, flat))
    return Inlined(flat, calls, before, after)
