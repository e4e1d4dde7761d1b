"""Weights of products and tables in blocks of 4 or 8 bits: MatMulNBitsQuantizer.

``weight_operators.py`` has other formats, and convolutions and tables in 8 bits, which it does not
support.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.method import Made, Method, Precision
from htp_export.capabilities.quantize.methods.cast import Cast, cast_nodes
from htp_export.capabilities.quantize.ort_quantizers import (
    groups_in_memory,
    made_file,
    quantizers,
    quietly,
)
from htp_export.capabilities.quantize.sliced_weights import put_whole, take_large
from htp_export.capabilities.quantize.weight_operators import (
    CONVOLUTIONS,
    FIRST_BLOCKS,
    can_be_product,
    store_in_eight_bits,
    way_as_product,
    write_dequantized,
    write_products,
)
from htp_export.capabilities.quantize.work import Facts, Left, Work
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.files.model_files import read_model
from htp_export.format.recipes import Recipe, step
from htp_export.model.recipes import recipe_of, recorded
from htp_export.weights.products import weight_axes, weight_place

_PACKING = ("rtn", "k-quant")
"""Algorithms that pack two zero points of a column into a byte: an odd number fails."""

_INT8 = 4
"""The accuracy level at which ONNX Runtime rounds activations to int8 and multiplies integers.

Without a level it computes in fp32: with weights of 8 bits more slowly than with floats
(docs/quantize.md).
"""

_SCALES = 2
"""The place of the scales among the inputs of ``MatMulNBits``."""

_FIRST_BY_CHANNEL, _FIRST_NARROW = 13, 19
"""The first opsets of ``DequantizeLinear`` with an axis, and with scales in float16."""


class Blocks(Method):
    """Weights are rounded in blocks with a scale; activations stay, or are 16-bit floats."""

    activations = ("float32", "float16", "bfloat16")
    weights = ("int4", "int8")
    algorithms = ("default", "rtn", "hqq", "k-quant")
    accuracy_levels = (0, 1, 2, 3, 4)
    formats = ("default", "qdq")
    options = ("narrow_io",)
    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    order = 1
    in_subgraphs = True

    def check(self) -> None:
        precision = self.precision
        if self.is_standard and self._is_hqq:
            raise precision.fault(
                "zero points of hqq are no integers, and DequantizeLinear has no others"
            )
        if self._cast is None and precision.options:
            raise precision.fault("narrow_io is for activations in float16 or bfloat16")
        if precision.bits != 4 and self._is_hqq:
            raise precision.fault(f"with hqq, ONNX Runtime runs 4 bits, not {precision.bits}")
        if self._is_hqq and precision.accuracy_level:
            raise precision.fault(
                "accuracy_level has no effect with hqq: zero points that are floats mean fp32"
            )
        if self.is_standard and precision.accuracy_level is not None:
            raise precision.fault(
                "accuracy_level is of MatMulNBits, which the format qdq does not write"
            )

    @property
    def accuracy_level(self) -> int:
        """The arithmetic of products: int8, or fp32 for zero points in floats.

        Products in float16 have no level: at level 4, ONNX Runtime 1.32 computes other results on
        the CPU, unless all of its optimizations are on.
        """
        level = self.precision.accuracy_level
        if level is not None:
            return level
        if self.is_standard or self._is_hqq or self.precision.activation == "float16":
            return 0
        return _INT8

    @property
    def is_standard(self) -> bool:
        """Whether the weights are written for operators of ONNX, not of ONNX Runtime."""
        return self.precision.format == "qdq"

    @property
    def _is_hqq(self) -> bool:
        """Whether zero points are floats."""
        return self.precision.algorithm == "hqq"

    @property
    def first_opset(self) -> int:
        return FIRST_BLOCKS if self.is_standard else super().first_opset

    @property
    def _cast(self) -> Cast | None:
        """The method for the other operators of the modules; None for activations in float32."""
        kind = self.precision.activation
        if kind == "float32":
            return None
        return Cast(Precision(kind, "cast", kind, kind, options=self.precision.options))

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        if self._has_blocks(node) and not self._needs_opset(node, facts):
            return True
        return self._cast is not None and self._cast.takes(node, facts)

    def why_not(self, node: ir.Node, facts: Facts) -> str:
        reason = super().why_not(node, facts)
        if reason:
            return reason
        opset = self._needs_opset(node, facts) if self._has_blocks(node) else 0
        if opset:
            return f"DequantizeLinear supports it from opset {opset} on, and the model has {facts.opset}"
        if self._fails_on_odd_blocks(node):
            return f"{self.precision.algorithm} fails on an odd number of blocks in a column: choose another block_size"
        return ""

    def _needs_opset(self, node: ir.Node, facts: Facts) -> int:
        """The opset that a convolution needs if the model has an earlier one; 0 otherwise."""
        if node.op_type not in CONVOLUTIONS:
            return 0
        weight = constant_of(node.inputs[weight_place(node)])
        if weight is None:
            return 0
        first = _FIRST_NARROW if weight.dtype == ir.DataType.FLOAT16 else _FIRST_BY_CHANNEL
        return first if facts.opset < first else 0

    def _has_blocks(self, node: ir.Node) -> bool:
        """Whether the weight of a node can be stored in this precision.

        These are products with a constant matrix on the right, a ``Gather`` of rows, and with 8 bits,
        convolutions.
        """
        if node.domain or node.op_type not in ("MatMul", "Gemm", "Gather", *CONVOLUTIONS):
            return False
        weight = constant_of(node.inputs[weight_place(node)])
        if weight is None or weight.dtype not in self.floats:
            return False
        if node.op_type in CONVOLUTIONS:
            is_default = self.precision.algorithm == "default"
            return self.precision.bits == 8 and is_default and self._cast is None
        if len(weight.shape) != 2:
            return False
        if node.op_type == "Gather":
            return self._looks_up_blocks() and node.attributes.get_int("axis", 0) == 0
        return can_be_product(node) and not self._fails_on_odd_blocks(node)

    def _looks_up_blocks(self) -> bool:
        """Whether a ``Gather`` of rows can have the precision.

        The ``Gather`` of ONNX has no blocks: ONNX Runtime would dequantize the whole table in every
        run.
        """
        if self.precision.algorithm != "default" or self.is_standard:
            return False
        return self.precision.bits == 4 or self._cast is None

    def _fails_on_odd_blocks(self, node: ir.Node) -> bool:
        """Whether ONNX Runtime's algorithm fails: on an odd number of 4-bit zero points."""
        weight = constant_of(node.inputs[1]) if can_be_product(node) else None
        if weight is None or len(weight.shape) != 2:
            return False
        is_packed = self.precision.algorithm in _PACKING and self.precision.bits == 4
        if not is_packed or not self._has_points():
            return False
        rows, _ = sizes_in_blocks(node)
        return math.ceil(rows / self.precision.block_size) % 2 == 1

    def _has_points(self) -> bool:
        return not self.precision.symmetric or self.precision.algorithm == "k-quant"

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        if not self._has_blocks(node) or place != weight_place(node):
            narrow = None if self._cast is None else self._cast.bytes_of(node, place, tensor, facts)
            if narrow is None and self.shared_by(node, place) is not None:
                return tensor.nbytes
            return narrow
        if node.op_type in CONVOLUTIONS:
            axes = weight_axes(node, place)
            if axes is None:
                return None
            channels = int(tensor.shape.numpy()[axes[1]])
            return tensor.size + int(tensor.dtype.itemsize) * channels
        bits, size = self.precision.bits, self.precision.block_size
        along, across = sizes_in_blocks(node)
        blocks = math.ceil(along / size)
        if node.op_type == "Gather" or self.is_standard:
            # packed without padding, over all rows
            packed = math.ceil(along * across * bits / 8)
            points = math.ceil(across * blocks * bits / 8)
        else:
            # MatMulNBits: whole blocks, and whole bytes of zero points, for each column
            packed = across * blocks * size * bits // 8
            points = across * math.ceil(blocks * bits / 8)
        if self._is_hqq:
            points = across * blocks * int(tensor.dtype.itemsize)  # floats
        elif not self._has_points():
            points = 0
        scale_bits = min(self.precision.activation_bits, tensor.dtype.bitwidth)
        return packed + across * blocks * scale_bits // 8 + points

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        if not self._has_blocks(node):
            return None
        if node.op_type in ("MatMul", "Gemm"):
            return way_as_product(node, place)
        return (node.op_type, weight_axes(node, place)) if place == weight_place(node) else None

    def apply(self, nodes: Sequence[ir.Node], work: Work) -> Iterator[Left]:
        with_weight = [node for node in nodes if self._has_blocks(work.original_of[node])]
        before = set(work.model.graph.all_nodes())
        yield from super().apply(with_weight, work)
        if self._cast is not None:
            untouched = before.difference(nodes)
            cast_nodes(
                [node for node in work.model.graph.all_nodes() if node not in untouched],
                self.precision,
                work,
            )

    def groups(self, nodes: Sequence[ir.Node], work: Work) -> Iterable[Sequence[ir.Node]]:
        # Weights of these are computed when they are written: one group for each graph is enough.
        apart = [node for node in nodes if self._in_eight_bits(node)]
        for graph in dict.fromkeys(node.graph for node in apart):
            yield [node for node in apart if node.graph is graph]
        yield from groups_in_memory([node for node in nodes if not self._in_eight_bits(node)])

    def _in_eight_bits(self, node: ir.Node) -> bool:
        return self.precision.bits == 8 and node.op_type in ("Gather", *CONVOLUTIONS)

    def quantize(self, part: Submodel, work: Work) -> Made:
        if any(self._in_eight_bits(node) for node in part.model.graph):
            store_in_eight_bits(
                part.model.graph, self.precision.block_size, symmetric=self.precision.symmetric
            )
            return Made(part.model)
        tool = quantizers("matmul_nbits_quantizer")
        write_products(part.model.graph)
        # The quantizer names its tensors after the weight; recipes are recorded by these names.
        weights: dict[str, Recipe] = {}
        tables: dict[str, Recipe] = {}
        for value in part.model.graph.initializers.values():
            consumers = {use.node.op_type for use in value.uses()}
            if consumers <= {"MatMul"}:
                weights[f"{value.name}_"] = recipe_of(value)
            elif consumers == {"Gather"}:
                tables[f"{value.name}_"] = recipe_of(value)
        # The blocks of hqq are not independent: it ends when the mean error of the weight grows.
        large = [] if self._is_hqq else take_large(part.model.graph)
        made = self._rounded(tool, part.proto())
        for weight in large:
            # its parts in no variable: they would be in memory while the file is written
            put_whole(
                made.graph, weight, weight.quantized(lambda model: self._rounded(tool, model))
            )
        with made_file() as file:
            onnx.save(made, file)
            quantized = read_model(file)
        for node in quantized.graph:
            level = self._level_of(node) if node.op_type == "MatMulNBits" else 0
            if level:
                node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", level)
        # The step `quantize` of recipes computes the levels of this algorithm alone.
        if self.precision.algorithm == "default":
            self._record(quantized.graph, weights, tables)
        if self.is_standard:
            write_dequantized(quantized.graph)
        return Made(quantized)

    def _rounded(self, tool: Any, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Run ONNX Runtime's quantizer on a model, which is changed."""
        quantizer = tool.MatMulNBitsQuantizer(
            proto,
            block_size=self.precision.block_size,
            is_symmetric=self.precision.symmetric,
            algo_config=self._algorithm(tool, proto.graph.node),
        )
        with quietly():
            quantizer.process()
        made: onnx.ModelProto = quantizer.model.model
        # the quantizer writes a weight once for each of its consumers
        unique = {tensor.name: tensor for tensor in made.graph.initializer}
        if len(unique) < len(made.graph.initializer):
            del made.graph.initializer[:]
            made.graph.initializer.extend(unique.values())
        return made

    def _level_of(self, node: ir.Node) -> int:
        """The level of one product, whose scales are in the type of its input."""
        scales = constant_of(node.inputs[_SCALES])
        is_narrow = scales is not None and scales.dtype == ir.DataType.FLOAT16
        return 0 if is_narrow and self.precision.accuracy_level is None else self.accuracy_level

    def _record(
        self, graph: ir.Graph, weights: Mapping[str, Recipe], tables: Mapping[str, Recipe]
    ) -> None:
        """Record the recipes of levels, scales and zero points; keys are the prefixes of names."""
        bits, size = self.precision.bits, self.precision.block_size
        settings = [bits, size, int(self.precision.symmetric)]
        parts = {f"Q{bits}": "levels", "scales": "scales", "zero_points": "zero_points"}
        for end, part in parts.items():
            recipes = {
                **{
                    f"{name}{end}": step("quantize", of, [part, *settings])
                    for name, of in weights.items()
                },
                **{
                    f"{name}{end}": step("round", of, [part, "rows", *settings])
                    for name, of in tables.items()
                },
            }
            for name, recipe in recipes.items():
                value = graph.initializers.get(name)
                if value is not None and value.const_value is not None:
                    value.const_value = recorded(value.const_value, recipe)

    def _algorithm(self, tool: Any, nodes: Sequence[onnx.NodeProto]) -> Any:
        """The configuration of the algorithm, for some nodes."""
        algorithm, bits, size = (
            self.precision.algorithm,
            self.precision.bits,
            self.precision.block_size,
        )
        if self._is_hqq:
            return tool.HQQWeightOnlyQuantConfig(block_size=size, bits=bits)
        if algorithm in _PACKING:
            setting = {"bits": bits, "group_size": size}
            by_node = {node.name: dict(setting) for node in nodes}
            if algorithm == "rtn":
                return tool.RTNWeightOnlyQuantConfig(customized_weight_config=by_node)
            return tool.KQuantWeightOnlyQuantConfig(customized_weight_config=by_node)
        op_types = {node.op_type for node in nodes}
        return tool.DefaultWeightOnlyQuantConfig(
            size,
            self.precision.symmetric,
            bits=bits,
            op_types_to_quantize=tuple(kind for kind in ("MatMul", "Gather") if kind in op_types),
        )


METHOD = Blocks


def sizes_in_blocks(node: ir.Node) -> tuple[int, int]:
    """The size of a matrix along the axis that is cut into blocks, and of the other axis."""
    place = weight_place(node)
    weight, axes = constant_of(node.inputs[place]), weight_axes(node, place)
    assert weight is not None
    assert axes is not None
    first, second = (int(size) for size in weight.shape.numpy())
    return (second, first) if axes[0] % 2 else (first, second)
