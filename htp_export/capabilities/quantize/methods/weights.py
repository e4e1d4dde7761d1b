"""Weights of matrix products and tables in few bits, block by block: ONNX Runtime's MatMulNBitsQuantizer.

Other forms, and convolutions and tables in 8 bits, which it does not know: ``weight_operators.py``.
"""

from __future__ import annotations

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
"""Algorithms that pack two zero points of a column into a byte, and fail on an odd number of them."""
_INT8 = 4
"""The accuracy level at which ONNX Runtime rounds activations to int8, block by block, and multiplies integers.

Without a level it computes in fp32: with weights of 8 bits more slowly than with floats
(docs/quantize.md).
"""

_SCALES = 2  # their place among the inputs of MatMulNBits

# opsets of DequantizeLinear with an axis, and with scales in float16
_FIRST_BY_CHANNEL, _FIRST_NARROW = 13, 19


class Blocks(Method):
    """Weights are rounded in blocks with a scale each; activations stay, or are floats of 16 bits."""

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
        if self.is_standard and self.precision.algorithm == "hqq":
            raise self.precision.fault(
                "zero points of hqq are no integers, and those of DequantizeLinear are"
            )
        if self._around is None and self.precision.options:
            raise self.precision.fault("narrow_io is for activations in float16 or bfloat16")
        if self.precision.bits != 4 and self.precision.algorithm == "hqq":
            raise self.precision.fault(
                f"with hqq, ONNX Runtime runs 4 bits, not {self.precision.bits}"
            )
        if self.precision.algorithm == "hqq" and self.precision.accuracy_level:
            raise self.precision.fault(
                "accuracy_level has no effect with hqq: zero points that are floats mean fp32"
            )
        if self.is_standard and self.precision.accuracy_level is not None:
            raise self.precision.fault(
                "accuracy_level is of MatMulNBits, which the format qdq does not write"
            )

    @property
    def accuracy_level(self) -> int:
        """The arithmetic of products: int8, unless zero points are floats, with which ONNX Runtime computes in fp32.

        Products in float16 have none: at level 4, ONNX Runtime 1.32 computes something else on the
        CPU, unless all of its optimizations are on.
        """
        given = self.precision.accuracy_level
        has_none = (
            self.is_standard
            or self.precision.algorithm == "hqq"
            or self.precision.activation == "float16"
        )
        return given if given is not None else 0 if has_none else _INT8

    @property
    def is_standard(self) -> bool:
        """Whether the operators of ONNX read the weights."""
        return self.precision.format == "qdq"

    @property
    def first_opset(self) -> int:
        return FIRST_BLOCKS if self.is_standard else super().first_opset

    @property
    def _around(self) -> Cast | None:
        """What is done to operators without such weights, and to what the others read and make, if anything is."""
        kind = self.precision.activation
        return (
            None
            if kind == "float32"
            else Cast(Precision(kind, "cast", kind, kind, options=self.precision.options))
        )

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        has_blocks = self._has_blocks(node) and not self._needs_opset(node, facts)
        return has_blocks or (self._around is not None and self._around.takes(node, facts))

    def why_not(self, node: ir.Node, facts: Facts) -> str:
        if why := super().why_not(node, facts):
            return why
        if self._has_blocks(node) and (opset := self._needs_opset(node, facts)):
            return f"DequantizeLinear has what it needs from opset {opset} on, and the model has {facts.opset}"
        if self._fails_on_odd_blocks(node):
            return f"{self.precision.algorithm} fails on an odd number of blocks in a column: choose another block_size"
        return ""

    def _needs_opset(self, node: ir.Node, facts: Facts) -> int:
        """The opset from which on a convolution can be stored, where the model has an earlier one; 0 otherwise."""
        weight = (
            constant_of(node.inputs[weight_place(node)]) if node.op_type in CONVOLUTIONS else None
        )
        if weight is None:
            return 0
        first = _FIRST_NARROW if weight.dtype == ir.DataType.FLOAT16 else _FIRST_BY_CHANNEL
        return first if facts.opset < first else 0

    def _has_blocks(self, node: ir.Node) -> bool:
        """Whether a product has a constant matrix on the right; also a ``Gather`` of rows; with 8 bits, convolutions.

        The ``Gather`` of ONNX has no blocks: ONNX Runtime would dequantize the whole table in every
        run.
        """
        if node.domain or node.op_type not in ("MatMul", "Gemm", "Gather", *CONVOLUTIONS):
            return False
        weight = constant_of(node.inputs[weight_place(node)])
        if weight is None or weight.dtype not in self.floats:
            return False
        precision, is_default = self.precision, self.precision.algorithm == "default"
        if node.op_type in CONVOLUTIONS:
            return precision.bits == 8 and is_default and self._around is None
        if len(weight.shape) != 2:
            return False
        if node.op_type == "Gather":
            takes_rows = (
                is_default
                and not self.is_standard
                and (precision.bits == 4 or self._around is None)
            )
            return takes_rows and node.attributes.get_int("axis", 0) == 0
        return can_be_product(node) and not self._fails_on_odd_blocks(node)

    def _fails_on_odd_blocks(self, node: ir.Node) -> bool:
        weight = constant_of(node.inputs[1]) if can_be_product(node) else None
        if weight is None or len(weight.shape) != 2:
            return False
        fails = (
            self.precision.algorithm in _PACKING and self.precision.bits == 4 and self._has_points()
        )
        return fails and -(-sizes_in_blocks(node)[0] // self.precision.block_size) % 2 == 1

    def _has_points(self) -> bool:
        return not self.precision.symmetric or self.precision.algorithm == "k-quant"

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        if not self._has_blocks(node) or place != weight_place(node):
            around = (
                None if self._around is None else self._around.bytes_of(node, place, tensor, facts)
            )
            return (
                around
                if around is not None or self.shared_by(node, place) is None
                else tensor.nbytes
            )
        if node.op_type in CONVOLUTIONS:
            axes = weight_axes(node, place)
            return (
                tensor.size + int(tensor.dtype.itemsize) * int(tensor.shape.numpy()[axes[1]])
                if axes is not None
                else None
            )
        bits, size = self.precision.bits, self.precision.block_size
        along, across = sizes_in_blocks(node)
        blocks = -(-along // size)
        if node.op_type == "Gather" or self.is_standard:
            packed, points = (along * across * bits + 7) // 8, (across * blocks * bits + 7) // 8
        else:
            packed, points = across * blocks * size * bits // 8, across * ((blocks * bits + 7) // 8)
        if self.precision.algorithm == "hqq":
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
        with_weight = [node for node in nodes if self._has_blocks(work.twins[node])]
        known = set(work.model.graph.all_nodes())
        yield from super().apply(with_weight, work)
        if self._around is not None:
            chosen = set(nodes)
            new = [
                node for node in work.model.graph.all_nodes() if node not in known or node in chosen
            ]
            cast_nodes(new, self.precision, work)

    def groups(self, nodes: Sequence[ir.Node], work: Work) -> Iterable[Sequence[ir.Node]]:
        # nothing of them is in memory
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
        weights = {
            f"{value.name}_": recipe_of(value)
            for value in part.model.graph.initializers.values()
            if all(use.node.op_type == "MatMul" for use in value.uses())
        }
        tables = {
            f"{value.name}_": recipe_of(value)
            for value in part.model.graph.initializers.values()
            if value.uses() and all(use.node.op_type == "Gather" for use in value.uses())
        }
        quantizer = tool.MatMulNBitsQuantizer(
            part.proto(),
            block_size=self.precision.block_size,
            is_symmetric=self.precision.symmetric,
            algo_config=self._algorithm(tool, part),
        )
        with quietly():
            quantizer.process()
        made: onnx.ModelProto = quantizer.model.model
        # two readers of a weight write it twice
        unique = {tensor.name: tensor for tensor in made.graph.initializer}
        del made.graph.initializer[:]
        made.graph.initializer.extend(unique.values())
        with made_file() as file:
            onnx.save(made, file)
            quantized = read_model(file)
        for node in quantized.graph:
            if node.op_type == "MatMulNBits" and (level := self._level_of(node)):
                node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", level)
        if self.precision.algorithm == "default":
            self._record(quantized.graph, weights, tables)
        if self.is_standard:
            write_dequantized(quantized.graph)
        return Made(quantized)

    def _level_of(self, node: ir.Node) -> int:
        """The level of one product, whose scales are in the type of its input."""
        scales = constant_of(node.inputs[_SCALES])
        is_narrow = scales is not None and scales.dtype == ir.DataType.FLOAT16
        return 0 if is_narrow and self.precision.accuracy_level is None else self.accuracy_level

    def _record(
        self, graph: ir.Graph, weights: Mapping[str, Recipe], tables: Mapping[str, Recipe]
    ) -> None:
        """Record how the levels, scales and zero points of matrices and tables were made."""
        bits, size, symmetric = (
            self.precision.bits,
            self.precision.block_size,
            int(self.precision.symmetric),
        )
        for end, what in (
            (f"Q{bits}", "levels"),
            ("scales", "scales"),
            ("zero_points", "zero_points"),
        ):
            for weight, recipe in weights.items():
                value = graph.initializers.get(f"{weight}{end}")
                if value is not None and value.const_value is not None:
                    made = step("quantize", recipe, [what, bits, size, symmetric])
                    value.const_value = recorded(value.const_value, made)
            for table, recipe in tables.items():
                value = graph.initializers.get(f"{table}{end}")
                if value is not None and value.const_value is not None:
                    made = step("round", recipe, [what, "rows", bits, size, symmetric])
                    value.const_value = recorded(value.const_value, made)

    def _algorithm(self, tool: Any, part: Submodel) -> Any:
        """The configuration of the algorithm, for the nodes of a part."""
        algorithm, bits, size = (
            self.precision.algorithm,
            self.precision.bits,
            self.precision.block_size,
        )
        if algorithm in _PACKING:
            by_node = {
                str(node.name): {"bits": bits, "group_size": size} for node in part.model.graph
            }
            config = (
                tool.RTNWeightOnlyQuantConfig
                if algorithm == "rtn"
                else tool.KQuantWeightOnlyQuantConfig
            )
            return config(customized_weight_config=by_node)
        if algorithm == "hqq":
            return tool.HQQWeightOnlyQuantConfig(block_size=size, bits=bits)
        kinds = tuple(
            kind
            for kind in ("MatMul", "Gather")
            if any(node.op_type == kind for node in part.model.graph)
        )
        return tool.DefaultWeightOnlyQuantConfig(
            size, self.precision.symmetric, bits=bits, op_types_to_quantize=kinds
        )


METHOD = Blocks


def sizes_in_blocks(node: ir.Node) -> tuple[int, int]:
    """The elements of a weight along a block, and across."""
    weight, axes = (
        constant_of(node.inputs[weight_place(node)]),
        weight_axes(node, weight_place(node)),
    )
    assert weight is not None
    assert axes is not None
    first, second = (int(size) for size in weight.shape.numpy())
    return (second, first) if axes[0] % 2 else (first, second)
