"""NNCF as the engine of weights alone: ``nncf.compress_weights`` for the nodes of the chosen modules alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.blocks import takes_blocks
from htp_export.capabilities.quantize.nncf_engine import calling_nncf, check_result, put_first
from htp_export.capabilities.quantize.precisions import Precision
from htp_export.capabilities.quantize.quantizers import write_products
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.runtime.arrays import Array
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import SessionSettings
from htp_export.shapes.operator_kinds import subgraphs
from htp_export.weights.products import weight_axes, weight_place

__all__ = ["compress_with_nncf", "nncf_weight_bytes", "scaled_before", "takes_nncf_weights"]

_BLOCKS_FROM = 21  # the opset whose DequantizeLinear has blocks; before, NNCF writes MatMulNBits
_MICROSOFT = "com.microsoft"
_RANKS = {"Conv": None, "ConvTranspose": None, "Gather": 2}
_SCALED_NODES = 2  # an activation function and a Mul between two products


def takes_nncf_weights(node: ir.Node, precision: Precision) -> bool:
    """Whether NNCF compresses the constant weight of a node.

    In 4 bits, products whose blocks are all full: it refuses others, and what it writes for tables does not load.
    In 8 bits, convolutions and tables, too.

    Raises:
        InputError: If NNCF is not installed.
    """
    from htp_export.capabilities.carry.adapting import library

    library("nncf", "nncf")
    if node.domain or subgraphs(node):
        return False
    if node.op_type in ("MatMul", "Gemm"):
        return takes_blocks(node, precision) and (precision.bits == 8 or _along(node) % precision.block_size == 0)
    if precision.bits != 8 or node.op_type not in _RANKS or len(node.inputs) <= weight_place(node):
        return False
    weight, rank = constant_of(node.inputs[weight_place(node)]), _RANKS[node.op_type]
    if weight is None or weight.dtype != ir.DataType.FLOAT or rank not in (None, len(weight.shape)):
        return False
    return node.op_type != "Gather" or node.attributes.get_int("axis", 0) == 0


def nncf_weight_bytes(node: ir.Node, tensor: ir.TensorProtocol, precision: Precision, opset: int) -> int:
    """The bytes of a weight that NNCF compressed, with its scales and zero points."""
    shape = [int(size) for size in tensor.shape.numpy()]
    elements = math.prod(shape)
    if precision.bits == 8:
        axes = weight_axes(node, 1)  # a table has a scale for each row
        channels = shape[0 if axes is None else axes[1]]
        return elements + channels * (4 if precision.symmetric else 5)
    blocks, across = _along(node) // precision.block_size, elements // _along(node)
    columns = across * ((blocks + 1) // 2)
    points = 0 if precision.symmetric else columns if opset < _BLOCKS_FROM else (blocks * across + 1) // 2
    return (elements + 1) // 2 + 4 * blocks * across + points


def _along(node: ir.Node) -> int:
    """The elements of the weight of a product over which it sums."""
    weight, axes = constant_of(node.inputs[weight_place(node)]), weight_axes(node, weight_place(node))
    assert weight is not None
    assert axes is not None
    return int(weight.shape.numpy()[axes[0]])


def scaled_before(
    nodes: Sequence[ir.Node], allowed: Mapping[ir.Node, Precision], precision: Precision
) -> list[ir.Node]:
    """The nodes in front of products that AWQ needs to see: it divides what they make by the scales of weights.

    Only those whose result nothing else reads, and that have the same precision in the plan.

    Args:
        nodes: The products.
        allowed: Node → the precision that the plan gives it.
        precision: That of the products.
    """
    found = dict.fromkeys(nodes)
    edge = [node.inputs[0] for node in nodes]
    for _ in range(_SCALED_NODES):
        makers = [value.producer() for value in edge if value is not None]
        new = [
            node
            for node in dict.fromkeys(maker for maker in makers if maker is not None)
            if node not in found
            and allowed.get(node) == precision
            and node.op_type not in ("MatMul", "Gemm", *_RANKS)  # NNCF would compress them, too
            and node.graph is nodes[0].graph
            and not subgraphs(node)
            and len(node.outputs) == 1
            and len(node.outputs[0].uses()) == 1
            and not node.outputs[0].is_graph_output()
        ]
        found.update(dict.fromkeys(new))
        edge = [value for node in new for value in node.inputs]
    order = {node: place for place, node in enumerate(nodes[0].graph or ())}
    return sorted(found, key=order.__getitem__)


def compress_with_nncf(
    part: Submodel, precision: Precision, runs: Sequence[Mapping[str, Array]]
) -> tuple[ir.Model, list[str]]:
    """Compress the weights of a part; the result is checked, loaded and run before it is returned.

    Args:
        part: Nodes that `takes_nncf_weights`, and others; it is used up.
        precision: A precision of the method ``weights`` whose engine is ``nncf``.
        runs: The values of the inputs of the part, for each run; the first one is for the check.

    Returns:
        What NNCF made; and the names of the nodes with weights that it left as they are.

    Raises:
        ToolError: If NNCF fails, or if onnx or ONNX Runtime refuses its result.
    """
    from htp_export.capabilities.carry.adapting import library

    nncf = library("nncf", "nncf")
    weighted = [str(node.name) for node in part.model.graph if takes_nncf_weights(node, precision)]
    if precision.bits == 4:
        write_products(part.model.graph)  # NNCF writes blocks of a Gemm's weight along the wrong axis
    given = part.proto()
    put_first(given, "")
    outputs = [str(value.name) for value in part.model.graph.outputs]
    with Runner(part.model, "the part for NNCF", SessionSettings()).opened(outputs) as run:
        expected = run(runs[0])
    with calling_nncf(precision):
        made: onnx.ModelProto = nncf.compress_weights(given, **_arguments(nncf, precision, runs))
    _repair(made)
    model = check_result(made, expected, runs[0])
    return model, [name for name in weighted if not _is_compressed(model, name)]


def _arguments(nncf: Any, precision: Precision, runs: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
    """The fields of a precision as arguments of ``nncf.compress_weights``."""
    kind = "SYM" if precision.symmetric else "ASYM"
    mode = getattr(nncf.CompressWeightsMode, f"INT{precision.bits}_{kind}")
    if precision.bits == 8:
        return {"mode": mode}
    arguments = {"mode": mode, "group_size": precision.block_size, "ratio": 1.0, "all_layers": True}
    if precision.calibrated:
        fitted = {"awq": precision.awq, "scale_estimation": precision.scale_estimation}
        arguments |= {"dataset": nncf.Dataset(list(runs)), "subset_size": len(runs), **fitted}
    return arguments


def _repair(made: onnx.ModelProto) -> None:
    """Write what NNCF 3.4 leaves out.

    ``MatMulNBits`` needs an opset import, and zero points of which two are in a byte. The scales of channels of a
    convolution are a vector.
    """
    operators = [node for node in made.graph.node if node.domain == _MICROSOFT]
    if operators and all(entry.domain != _MICROSOFT for entry in made.opset_import):
        made.opset_import.append(onnx.helper.make_opsetid(_MICROSOFT, 1))
    tensors = {tensor.name: tensor for tensor in made.graph.initializer}
    for node in made.graph.node:
        read = [tensors.get(name) for name in node.input]
        sizes = {attribute.name: attribute.i for attribute in node.attribute}
        if node in operators and len(read) > 3 and read[3] is not None:
            _pack(read[3], sizes)
        elif node.op_type == "DequantizeLinear" and not sizes.get("block_size"):
            for tensor in read[1:]:
                if tensor is not None and len(tensor.dims) > 1 and max(tensor.dims) == math.prod(tensor.dims):
                    tensor.dims[:] = [max(tensor.dims)]


def _pack(points: onnx.TensorProto, sizes: Mapping[str, int]) -> None:
    """Write zero points of 4 bits, each in a byte, as two in a byte."""
    blocks = sizes["K"] // sizes["block_size"]
    if sizes["bits"] == 4 and list(points.dims) == [sizes["N"], blocks] and blocks > 1:
        array = np.pad(onnx.numpy_helper.to_array(points), ((0, 0), (0, blocks % 2)))
        points.CopyFrom(onnx.numpy_helper.from_array(array[:, ::2] | array[:, 1::2] << 4, points.name))


def _is_compressed(model: ir.Model, name: str) -> bool:
    """Whether a node of a part reads a weight of few bits, or was replaced by one that does."""
    node = next((node for node in model.graph if node.name == name), None)
    makers = [] if node is None else [value.producer() for value in node.inputs if value is not None]
    return node is None or any(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers)
