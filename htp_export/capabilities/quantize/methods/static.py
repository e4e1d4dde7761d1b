"""Integers with measured ranges, in QuantizeLinear and DequantizeLinear: the static quantizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from htp_export.capabilities.quantize.calibrating import (
    CALIBRATIONS,
    Calibration,
    Ranges,
    is_divisible,
    passes_over_data,
)
from htp_export.capabilities.quantize.calibration_records import mark, number_of_calibration
from htp_export.capabilities.quantize.method import Made, Method
from htp_export.capabilities.quantize.ort_quantizers import quantizers, raised_by_tool, tool_error
from htp_export.capabilities.quantize.static_biases import (
    WITH_BIAS,
    bias_shape,
    fit_biases,
    hide_biases,
    is_bias,
)
from htp_export.capabilities.quantize.static_part import TYPES, StaticPart
from htp_export.capabilities.quantize.weight_operators import factor_of, fold_factors
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.errors import HtpExportError
from htp_export.files.filesystem import temporary_folder
from htp_export.files.model_files import write_for_tool
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import subgraphs
from htp_export.weights.products import weight_axes

_LARGE_PART = 1 << 30
"""Bytes of weights above which the calibrated file has external data: protobuf ends at 2 GiB, and
ONNX Runtime adds outputs to the file."""

_FIRST_QDQ, _FIRST_PER_CHANNEL = 10, 13
"""The first opsets with QuantizeLinear, and with its attribute ``axis``."""

_FLOATS_FROM = {"BatchNormalization": 3, "Resize": 1}
"""Operator → the place of the first input that stays a float, as the quantizer does not know it."""

_NORMS = frozenset(("LayerNormalization", "InstanceNormalization", "BatchNormalization"))
_MATRIX_AXIS = 1
"""The axis along which ONNX Runtime has scales of a matrix of ``MatMul``, on either side."""

_MOST_LISTED = 3
"""Tensors that a reason lists: it is one line of a note, and a mask has dozens of copies."""

_MOST_READ = 1 << 24
"""Elements above which a weight is not read in search of mask values: masks are far smaller."""


class Static(Method):
    """Activations and weights are integers."""

    activations = tuple(TYPES)
    weights = tuple(TYPES)
    calibrations = tuple(CALIBRATIONS)
    with_producer = frozenset(("Relu", "Clip"))
    multiplies_integers = True
    calibrated = True

    def check(self) -> None:
        pair = self.precision.activation, self.precision.weight
        if pair in (("int8", "uint8"), ("int16", "uint8")):
            raise self.precision.fault(f"ONNX Runtime has no {pair[0]} with uint8 weights")

    @property
    def readings(self) -> int:
        return passes_over_data(self.precision.calibration)

    @property
    def first_opset(self) -> int:
        return _FIRST_PER_CHANNEL if self.precision.per_channel else _FIRST_QDQ

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether the quantizer knows the operator, and its floats are not quantized already."""
        registry = quantizers("registry")
        known = {*registry.QDQRegistry, *registry.QLinearOpsRegistry}
        is_known = not node.domain and node.op_type in known and not subgraphs(node)
        return is_known and facts.has_floats(node) and not facts.is_static(node)

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        """The bytes of a constant, and of its scales by channel. A bias has 32 bits."""
        if _stays_float(node, place):
            return None
        elements, bits = math.prod(tensor.shape.numpy()), self.precision.bits
        if is_bias(node, place):
            return _bias_bytes(node, tensor, self.channels(node))
        if _is_weight(node, place):
            # A scale in float32 and a zero point for each channel; a single scale is no weight.
            channels = self.channels(node, place)
            return elements * bits // 8 + (4 + bits // 8) * channels
        return elements * self.precision.activation_bits // 8

    def channels(self, node: ir.Node, place: int = 1) -> int:
        """The number of scales of a constant input; 0 for a single scale, or no constant."""
        return self.scales_along(_scale_axis(node, place), constant_of(node.inputs[place]))

    def scales_along(self, axis: int | None, weight: ir.TensorProtocol | None) -> int:
        """The number of scales of a weight along an axis; 0 for a single scale."""
        if not self.precision.per_channel or axis is None:
            return 0
        if weight is None or len(weight.shape) < 2:
            return 0
        return int(weight.shape.numpy()[axis])

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        tensor = constant_of(node.inputs[place])
        if tensor is None or not tensor.dtype.is_floating_point() or _stays_float(node, place):
            return None
        if is_bias(node, place):  # its scale depends on the scale of the input
            return None if _bias_bytes(node, tensor, self.channels(node)) is None else node
        axis = _scale_axis(node, place) if self.channels(node, place) else None
        return _is_weight(node, place), axis, factor_of(node, place)

    def quantize(self, part: Submodel, work: Work) -> Made:
        graph = part.model.graph
        # The quantizer resets beta.
        fold_factors(graph)
        floats = fit_biases(graph, self.channels)
        hidden = hide_biases(graph, floats)
        with temporary_folder() as folder:
            file = folder / "part.onnx"
            write_for_tool(part.model, file)
            ranges = self.ranges(part, file, work, hidden)
            left = self.immeasurable(part, ranges)
            made = StaticPart(
                part, self.precision, work.name, file, ranges, left, floats, hidden
            ).made()
        models = work.original.model, work.model
        number = number_of_calibration(*models, self.precision, work.planned.values())
        mark(made.model.graph, number)
        return made

    def ranges(
        self, part: Submodel, file: Path, work: Work, hidden: Mapping[str, ir.Value]
    ) -> Ranges:
        """The ranges of the tensors of a part over all runs.

        Args:
            part: The part.
            file: The part as a file.
            work: The model, and the data.
            hidden: Name of an input of the part → the constant that it replaces.
        """
        constants = {
            name: value.const_value.numpy()
            for name, value in hidden.items()
            if value.const_value is not None
        }
        size = sum(array.nbytes for array in constants.values())
        for value in part.weights.values():
            tensor = constant_of(value)
            size += 0 if tensor is None else tensor.nbytes

        @contextlib.contextmanager
        def runs() -> Iterator[Iterator[Mapping[str, Array]]]:
            with work.runs(part) as inputs:
                yield ({**arrays, **constants} for arrays in inputs)

        names = {name: str(value.name) for name, value in part.inputs.items()}
        names |= {name: str(value.name) for name, value in part.results.items()}
        calibration = Calibration(
            file,
            op_types=sorted({node.op_type for node in part.model.graph}),
            method=self.precision.calibration,
            symmetric=self.precision.symmetric,
            external=size > _LARGE_PART,
            names=names,
        )
        try:
            return calibration.ranges(runs)
        except HtpExportError:
            raise
        except Exception as error:  # the part does not run: no reason to leave single nodes
            if not raised_by_tool(error):
                raise
            raise tool_error(work.name, error) from error

    def ranged(self, node: ir.Node) -> Sequence[ir.Value | None]:
        """The tensors of a node that are quantized."""
        return (*node.inputs, *node.outputs)

    def immeasurable(self, part: Submodel, ranges: Ranges) -> dict[str, str]:
        """Name of a node → the reason why it stays: a tensor has no usable range."""
        wide = {name for name, bounds in ranges.bounds.items() if not is_divisible(bounds)}
        wide |= {name for name, value in part.weights.items() if not _is_moderate(value)}
        steps = self.precision.name
        problems = (
            (wide, f"values of {{}} fill masks and cannot be divided into the steps of {steps}"),
            (ranges.empty, "the data have no values of {}, whose range is not known"),
        )
        left: dict[str, str] = {}
        for names, problem in problems:
            first_of: dict[str, str] = {}  # node → the first of these tensors that it has
            for node in part.model.graph:
                for value in self.ranged(node):
                    if value is None or value.name not in names or _has_no_elements(value):
                        continue
                    first_of.setdefault(str(node.name), str(value.name))
            tensors = sorted({part.names.in_text(name) for name in first_of.values()})
            more = ", ..." if len(tensors) > _MOST_LISTED else ""
            listed = ", ".join(tensors[:_MOST_LISTED]) + more
            left |= dict.fromkeys(first_of, problem.format(listed))
        return left


METHOD = Static


def _stays_float(node: ir.Node, place: int) -> bool:
    """Whether an input of a quantized node stays a float."""
    first = _FLOATS_FROM.get(node.op_type)
    return first is not None and place >= first


def _is_weight(node: ir.Node, place: int) -> bool:
    """Whether a constant gets the type of weights; others get that of activations."""
    return node.op_type == "MatMul" or (place == 1 and node.op_type in WITH_BIAS)


def _scale_axis(node: ir.Node, place: int) -> int | None:
    """The axis of a constant input along which ONNX Runtime supports a scale for each element."""
    if node.op_type == "MatMul":
        return _MATRIX_AXIS
    if place != 1:
        return None
    return 1 if node.op_type in _NORMS else channel_axis(node)


def channel_axis(node: ir.Node) -> int | None:
    """The axis of the weight of a product that its results have, too; None for other nodes."""
    axes = weight_axes(node, 1)
    return None if axes is None else axes[1]


def _bias_bytes(node: ir.Node, tensor: ir.TensorProtocol, scales: int) -> int | None:
    """The bytes of a bias with its scales and zero points; None if it stays as it is."""
    shape = bias_shape(node, [int(size) for size in tensor.shape.numpy()], scales)
    if shape is None:
        return None
    # Integers, scales and zero points have 4 bytes each. Of a single pair of scale and zero point,
    # one is a scalar, which is not counted as a weight.
    return 12 * math.prod(shape) if scales else 4 * math.prod(shape) + 4


def _has_no_elements(value: ir.Value) -> bool:
    """Whether a tensor has no elements by its shape, so that its range makes no difference."""
    return value.shape is not None and 0 in value.shape


def _is_moderate(value: ir.Value) -> bool:
    """Whether a weight has no value that fills masks; large weights are not read."""
    tensor = constant_of(value)
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size > _MOST_READ:
        return True
    return is_divisible([tensor.numpy()])
