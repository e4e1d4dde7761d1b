"""Weights of matrix products and tables in few bits, block by block: ONNX Runtime's MatMulNBitsQuantizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.precisions import Algorithm, Precision
from htp_export.capabilities.quantize.quantizers import quantizers, quietly, write_products
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.runtime.arrays import Array
from htp_export.weights.products import is_matrix_product, weight_axes, weight_place

__all__ = ["GROUP_BYTES", "block_bytes", "groups_of", "quantize_blocks", "takes_blocks"]

GROUP_BYTES = 256 << 20
"""Weights that are in memory at a time; a single one may be larger."""


def takes_blocks(node: ir.Node, precision: Precision) -> bool:
    """Whether the weight of a node can be quantized block by block.

    A ``MatMul`` with a constant matrix on the right, a ``Gemm`` that is such a product with a bias, and, with 4 bits,
    a ``Gather`` of rows.
    """
    weight = weight_of(node)
    if weight is None or weight.dtype != ir.DataType.FLOAT or len(weight.shape) != 2:
        return False
    if node.op_type == "Gather":
        axis = node.attributes.get_int("axis", 0)
        return precision.bits == 4 and precision.algorithm == Algorithm.DEFAULT and axis == 0
    return is_matrix_product(node) and not _is_refused(node, precision)


def _is_refused(node: ir.Node, precision: Precision) -> bool:
    """Whether the algorithm fails: these pack two zero points of a column into a byte, and take no odd number."""
    packs = precision.algorithm in (Algorithm.RTN, Algorithm.GPTQ, Algorithm.K_QUANT) and precision.bits == 4
    if not packs or (precision.symmetric and precision.algorithm != Algorithm.K_QUANT):
        return False
    along, _ = _sizes(node)
    return -(-along // precision.block_size) % 2 == 1


def _sizes(node: ir.Node) -> tuple[int, int]:
    """The elements of a weight along a block, and across."""
    weight, axes = weight_of(node), weight_axes(node, weight_place(node))
    assert weight is not None
    assert axes is not None
    first, second = (int(size) for size in weight.shape.numpy())
    return (second, first) if axes[0] % 2 else (first, second)


def weight_of(node: ir.Node) -> ir.TensorProtocol | None:
    """The constant that a product or a table has as its weight."""
    if node.domain or node.op_type not in ("MatMul", "Gemm", "Gather"):
        return None
    return constant_of(node.inputs[weight_place(node)])


def block_bytes(node: ir.Node, precision: Precision) -> int:
    """The bytes of a weight in blocks, with its scales and zero points."""
    along, across = _sizes(node)
    blocks = -(-along // precision.block_size)
    if node.op_type == "Gather":
        packed = (along * across * precision.bits + 7) // 8
        points = (across * blocks * precision.bits + 7) // 8
    else:
        packed = across * blocks * precision.block_size * precision.bits // 8
        points = across * ((blocks * precision.bits + 7) // 8)
    if precision.algorithm == Algorithm.HQQ:
        points = across * blocks * 4  # floats
    elif precision.symmetric and precision.algorithm != Algorithm.K_QUANT:
        points = 0
    return packed + across * blocks * 4 + points


def groups_of(nodes: Sequence[ir.Node], weights: Callable[[ir.Node], Sequence[ir.Value]]) -> Iterator[list[ir.Node]]:
    """Nodes in groups whose weights fit into memory; those that share a weight are in one, so that it is read once.

    Args:
        nodes: The nodes, in order.
        weights: The weights of a node.
    """
    by_weight: dict[ir.Value | None, list[ir.Node]] = {}
    for node in nodes:
        by_weight.setdefault(next(iter(weights(node)), None), []).append(node)
    group, size = list[ir.Node](), 0
    for readers in by_weight.values():
        tensors = [constant_of(value) for node in readers[:1] for value in weights(node)]
        more = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        if group and size + more > GROUP_BYTES:
            yield _in_order(group, nodes)
            group, size = [], 0
        group += readers
        size += more
    if group:
        yield _in_order(group, nodes)


def _in_order(group: list[ir.Node], nodes: Sequence[ir.Node]) -> list[ir.Node]:
    chosen = frozenset(group)
    return [node for node in nodes if node in chosen]


def quantize_blocks(part: Submodel, precision: Precision, samples: Sequence[Mapping[str, Array]] = ()) -> ir.Model:
    """Quantize the weights of all nodes of a part.

    Args:
        part: Nodes that `takes_blocks`; it is used up.
        precision: A precision of the method ``weights``.
        samples: For GPTQ, the inputs of the part.
    """
    tool = quantizers("matmul_nbits_quantizer")
    write_products(part.model.graph)
    quantizer = tool.MatMulNBitsQuantizer(
        part.proto(),
        block_size=precision.block_size,
        is_symmetric=precision.symmetric,
        algo_config=_algorithm(tool, precision, part, samples),
    )
    with quietly():
        quantizer.process()
    made: onnx.ModelProto = quantizer.model.model
    unique = {tensor.name: tensor for tensor in made.graph.initializer}  # two readers of a weight write it twice
    del made.graph.initializer[:]
    made.graph.initializer.extend(unique.values())
    return ir.from_proto(made)


def _algorithm(tool: Any, precision: Precision, part: Submodel, samples: Sequence[Mapping[str, Array]]) -> Any:
    """The configuration of the algorithm, for the nodes of a part."""
    operators = ("MatMul", "Gather") if any(node.op_type == "Gather" for node in part.model.graph) else ("MatMul",)
    bits, size = precision.bits, precision.block_size
    if precision.algorithm in (Algorithm.RTN, Algorithm.K_QUANT):
        by_node = {str(node.name): {"bits": bits, "group_size": size} for node in part.model.graph}
        config = (
            tool.RTNWeightOnlyQuantConfig if precision.algorithm == Algorithm.RTN else tool.KQuantWeightOnlyQuantConfig
        )
        return config(customized_weight_config=by_node)
    if precision.algorithm == Algorithm.HQQ:
        return tool.HQQWeightOnlyQuantConfig(block_size=size, bits=bits)
    if precision.algorithm == Algorithm.GPTQ:
        return tool.GPTQWeightOnlyQuantConfig(_Reader(samples))
    return tool.DefaultWeightOnlyQuantConfig(size, precision.symmetric, bits=bits, op_types_to_quantize=operators)


class _Reader:
    """The inputs of a part, as ONNX Runtime's quantizers read them: it copies them to read them more than once."""

    def __init__(self, samples: Sequence[Mapping[str, Array]]) -> None:
        self._samples = list(samples)
        self._left = iter(self._samples)

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        return iter(self._samples)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reader:
        return _Reader(self._samples)

    def get_next(self) -> Mapping[str, Array] | None:
        return next(self._left, None)
