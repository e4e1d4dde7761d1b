"""Shapes that a file does not say, found without its weights."""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir

__all__ = ["infer_by_symbols", "shapes_by_symbols", "without_weights"]

_SMALL_BYTES = 1024  # what is larger holds weights, and no sizes that shapes could depend on

_log = logging.getLogger(__name__)


def infer_by_symbols(
    model: onnx.ModelProto,
    int_max: int = 2**31 - 1,
    auto_merge: bool = False,
    guess_output_rank: bool = False,
    verbose: int = 0,
) -> onnx.ModelProto | None:
    """What ``SymbolicShapeInference.infer_shapes`` of ONNX Runtime gives, with the same arguments; no file is written.

    It is run step by step: where it fails, ``infer_shapes`` leaves the model in the folder that the program runs in.

    Raises:
        Exception: Whatever its many rules come across; a RuntimeError where shapes stay unknown.
    """
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference, get_opset

    if (get_opset(model) or 0) < 7:
        return None
    inference = SymbolicShapeInference(int_max, auto_merge, guess_output_rank, verbose)
    inference._preprocess(model)
    complete = False
    while inference.run_:
        complete = inference._infer_impl()
    if not complete:
        raise RuntimeError("Incomplete symbolic shape inference")
    inference._update_output_from_vi()
    found: onnx.ModelProto = inference.out_mp_
    return found


def shapes_by_symbols(model: ir.Model) -> ir.Model:
    """A copy of a model whose weights are inputs, with the shapes that ONNX Runtime's symbolic inference finds.

    Where the inference fails, which it does on some operators, the shapes are those of the model.

    Args:
        model: The model; it is not changed, and its weights are not read.

    Examples:
        >>> import onnx_ir as ir
        >>> relu = ir.node("Relu", [ir.val("x", ir.DataType.FLOAT, ["n", 3])], outputs=[ir.val("y")])
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20}, name="g")
        >>> shapes_by_symbols(ir.Model(graph, ir_version=10)).graph.outputs[0].shape.dims
        (SymbolicDim('n'), 3)
    """
    copy = without_weights(model)
    proto = ir.to_proto(copy)
    del proto.graph.value_info[:]
    try:
        found = infer_by_symbols(proto, auto_merge=True)
    except Exception as error:  # it raises whatever its many rules come across
        _log.debug("symbolic shape inference failed: %s", error)
        found = None
    return copy if found is None else ir.from_proto(found)


def without_weights(model: ir.Model) -> ir.Model:
    """A copy of a model whose weights are inputs; constants from which sizes may be computed stay.

    Args:
        model: The model; it is not changed, and its weights are not read.
    """
    copy = model.clone()
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes > _SMALL_BYTES:
            if tensor is not None:
                value.shape, value.dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype
            del copy.graph.initializers[name]
            value.const_value = None
            if not value.is_graph_input():
                copy.graph.inputs.append(value)
    return copy
