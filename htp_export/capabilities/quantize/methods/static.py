"""Integers with ranges measured ahead, in QuantizeLinear and DequantizeLinear: ONNX Runtime's static quantizer."""

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
"""Bytes of weights from which on they are beside the file that is calibrated: protobuf ends at 2 GiB."""

_FIRST_QDQ, _FIRST_PER_CHANNEL = 10, 13  # opsets
_FLOATS_FROM = {"BatchNormalization": 3, "Resize": 1}
"""Inputs from this place on stay floats."""

_NORMS = frozenset(("LayerNormalization", "InstanceNormalization", "BatchNormalization"))
_MATRIX_AXIS = 1
"""The axis along which ONNX Runtime has scales of each matrix of a ``MatMul``, on the left and on the right."""

_MOST_LISTED = 3  # tensors that a reason names


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
        """Whether the quantizer knows the operator, reads or makes floats, and none of them are quantized already."""
        registry = quantizers("registry")
        known = {*registry.QDQRegistry, *registry.QLinearOpsRegistry}
        is_known = not node.domain and node.op_type in known and not subgraphs(node)
        return is_known and facts.has_floats(node) and not facts.is_static(node)

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        """The bytes of a constant; scales that are numbers and no vectors are no weights. Biases have 32 bits."""
        if place >= _FLOATS_FROM.get(node.op_type, place + 1):
            return None
        elements, bits = math.prod(tensor.shape.numpy()), self.precision.bits
        if is_bias(node, place):
            return _bias_bytes(node, tensor, self.channels(node))
        if node.op_type == "MatMul" or (place == 1 and node.op_type in WITH_BIAS):
            channels = self.channels(node, place)
            return elements * bits // 8 + (4 + bits // 8) * channels
        return elements * self.precision.activation_bits // 8

    def channels(self, node: ir.Node, place: int = 1) -> int:
        """The scales of a constant input of a node; 0 where it has one, or is no constant."""
        return self.scales_along(_scale_axis(node, place), constant_of(node.inputs[place]))

    def scales_along(self, axis: int | None, weight: ir.TensorProtocol | None) -> int:
        """The scales of a weight, one for each element of an axis; 0 for one scale."""
        if (
            not self.precision.per_channel
            or axis is None
            or weight is None
            or len(weight.shape) < 2
        ):
            return 0
        return int(weight.shape.numpy()[axis])

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        tensor = constant_of(node.inputs[place])
        if (
            tensor is None
            or not tensor.dtype.is_floating_point()
            or place >= _FLOATS_FROM.get(node.op_type, place + 1)
        ):
            return None
        if is_bias(node, place):  # its scale is made of that of the input
            return None if _bias_bytes(node, tensor, self.channels(node)) is None else node
        is_weight = node.op_type == "MatMul" or (place == 1 and node.op_type in WITH_BIAS)
        axis = _scale_axis(node, place) if self.channels(node, place) else None
        return is_weight, axis, factor_of(node, place)

    def quantize(self, part: Submodel, work: Work) -> Made:
        graph = part.model.graph
        fold_factors(graph)
        floats = fit_biases(graph, self.channels)
        hidden = hide_biases(graph, floats)
        with temporary_folder() as folder:
            file = folder / "part.onnx"
            write_for_tool(part.model, file)
            ranges = self.ranges(part, file, work, hidden)
            left = self.immeasurable(part, ranges)
            return StaticPart(
                part, self.precision, work.name, file, ranges, left, floats, hidden
            ).made()

    def ranges(
        self, part: Submodel, file: Path, work: Work, hidden: Mapping[str, ir.Value]
    ) -> Ranges:
        """The ranges of the tensors of a part, which is in a file, in all runs; ``hidden``: constants as inputs."""
        tensors = [
            *map(constant_of, part.weights.values()),
            *(value.const_value for value in hidden.values()),
        ]
        size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        constants = {
            name: value.const_value.numpy()
            for name, value in hidden.items()
            if value.const_value is not None
        }

        @contextlib.contextmanager
        def runs() -> Iterator[Iterator[Mapping[str, Array]]]:
            with work.runs(part) as found:
                yield ({**arrays, **constants} for arrays in found)

        calibration = Calibration(
            file,
            sorted({node.op_type for node in part.model.graph}),
            self.precision.calibration,
            self.precision.symmetric,
            size > _LARGE_PART,
            {
                name: str(value.name)
                for name, value in (*part.inputs.items(), *part.results.items())
            },
        )
        try:
            return calibration.ranges(runs)
        except HtpExportError:
            raise
        except Exception as error:  # the part does not run, which is no fault of a quantizer
            if not raised_by_tool(error):
                raise
            raise tool_error(work.name, error) from error

    def ranged(self, node: ir.Node) -> Sequence[ir.Value | None]:
        """The tensors of a node that are quantized."""
        return (*node.inputs, *node.outputs)

    def immeasurable(self, part: Submodel, ranges: Ranges) -> dict[str, str]:
        """Name of a node → why it stays, for nodes with a tensor whose range cannot be divided."""
        wide = {name for name, bounds in ranges.bounds.items() if not is_divisible(bounds)}
        wide |= {name for name, value in part.weights.items() if not _is_moderate(value)}
        steps = self.precision.name
        problems = (
            (wide, f"values of {{}} fill masks and cannot be divided into the steps of {steps}"),
            (ranges.empty, "the data have no values of {}, whose range is not known"),
        )
        left: dict[str, str] = {}
        for names, problem in problems:
            at_fault = dict[str, str]()
            for node in part.model.graph:
                values = (
                    value
                    for value in self.ranged(node)
                    if value is not None and value.name in names
                )
                first = next((value for value in values if not _has_no_elements(value)), None)
                if first is not None:
                    at_fault[str(node.name)] = str(first.name)
            tensors = sorted({part.names.in_text(name) for name in at_fault.values()})
            listed = ", ".join(tensors[:_MOST_LISTED]) + (
                ", ..." if len(tensors) > _MOST_LISTED else ""
            )
            left |= dict.fromkeys(at_fault, problem.format(listed))
        return left


METHOD = Static


def _scale_axis(node: ir.Node, place: int) -> int | None:
    """The axis of a constant input along which ONNX Runtime can have a scale for each element."""
    if node.op_type == "MatMul":
        return _MATRIX_AXIS
    if place != 1:
        return None
    return 1 if node.op_type in _NORMS else channel_axis(node)


def channel_axis(node: ir.Node) -> int | None:
    """The axis of the weight of a product that its results have; None if it is no product."""
    axes = weight_axes(node, 1)
    return None if axes is None else axes[1]


def _bias_bytes(node: ir.Node, tensor: ir.TensorProtocol, scales: int) -> int | None:
    """The bytes of a bias with its scales and zero points; None if it stays as it is."""
    shape = bias_shape(node, [int(size) for size in tensor.shape.numpy()], scales)
    if shape is None:
        return None
    return 12 * math.prod(shape) if scales else 4 * math.prod(shape) + 4


def _has_no_elements(value: ir.Value) -> bool:
    """Whether a tensor never has elements, so that its range makes no difference."""
    return value.shape is not None and 0 in value.shape


def _is_moderate(value: ir.Value) -> bool:
    """Whether a weight has no value that fills masks; only small ones are read."""
    tensor = constant_of(value)
    return (
        tensor is None
        or tensor.dtype != ir.DataType.FLOAT
        or tensor.size > 1 << 24
        or is_divisible([tensor.numpy()])
    )
