"""Integer operators with ranges measured ahead (QDQ) or at run time: ONNX Runtime's static and dynamic quantizers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.precisions import Calibration, Precision
from htp_export.capabilities.quantize.quantizers import quantizers, quietly, write_products
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.files.model_files import write_for_tool
from htp_export.files.parsing import model_from_proto
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import subgraphs
from htp_export.weights.products import is_matrix_product, weight_axes, weight_place

__all__ = [
    "WITH_PRODUCER",
    "Calibrator",
    "dynamic_bytes",
    "is_bias",
    "is_divisible",
    "quantize_at_run_time",
    "static_bytes",
    "takes_dynamic",
    "takes_static",
    "weights_of",
]

_LARGEST = 1e30
"""Ranges up to here are divided into steps. Masks are filled with numbers near the largest float, or infinity: in 256
steps between these and 0, all other values would be 0."""

WITH_PRODUCER = frozenset(("Relu", "Clip"))
"""They are quantized with the operator that makes what they read, and not alone."""

_WITH_BIAS = frozenset(
    ("Conv", "ConvTranspose", "Gemm", "LayerNormalization", "InstanceNormalization", "BatchNormalization")
)
_FLOATS_FROM = {"BatchNormalization": 3, "Resize": 1}
"""Inputs from this place on stay floats."""
_WITH_WEIGHT = frozenset(("MatMul", "Gemm", "Conv", "Gather"))


def takes_static(node: ir.Node, types: Mapping[str, ir.DataType | None]) -> bool:
    """Whether ONNX Runtime's static quantizer knows the operator, and a float tensor that it reads or makes."""
    registry = quantizers("registry")
    known = {*registry.QDQRegistry, *registry.QLinearOpsRegistry}
    if node.domain or node.op_type not in known or subgraphs(node):
        return False
    read = [value for value in (*node.inputs[:1], *node.outputs[:1]) if value is not None]
    return bool(read) and all(types.get(str(value.name)) == ir.DataType.FLOAT for value in read)


def takes_dynamic(node: ir.Node) -> bool:
    """Whether ONNX Runtime's dynamic quantizer makes the operator one on integers: one with a constant weight."""
    if node.domain or node.op_type not in _WITH_WEIGHT:
        return False
    weight = constant_of(node.inputs[weight_place(node)])
    if weight is None or weight.dtype != ir.DataType.FLOAT:
        return False
    return node.op_type not in ("MatMul", "Gemm") or is_matrix_product(node)


def quantize_at_run_time(part: Submodel, precision: Precision) -> ir.Model:
    """Make the operators of a part ones on integers, with ranges of activations that are measured when they run.

    ONNX Runtime runs ``ConvInteger`` with unsigned weights alone, so convolutions get these.
    """
    tool = quantizers()
    write_products(part.model.graph)
    kinds = {node.op_type for node in part.model.graph}
    unsigned = precision.weight == "uint8" or "Conv" in kinds
    with tempfile.TemporaryDirectory(prefix="htp_export_") as folder, quietly():
        target = Path(folder) / "made.onnx"
        tool.quantize_dynamic(
            part.proto(),
            target,
            op_types_to_quantize=sorted(kinds),
            per_channel=precision.per_channel and "Conv" not in kinds,
            reduce_range=precision.reduce_range,
            weight_type=tool.QuantType.QUInt8 if unsigned else tool.QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
        return model_from_proto(onnx.load(target))


def weights_of(node: ir.Node) -> list[ir.Value]:
    """The constants that a node reads as floats."""
    found = [value for value in node.inputs if value is not None]
    return [value for value in found if (tensor := constant_of(value)) and tensor.dtype == ir.DataType.FLOAT]


def dynamic_bytes(node: ir.Node, tensor: ir.TensorProtocol, precision: Precision) -> int:
    """The bytes of a weight of 8 bits whose operator is one on integers, with scales and zero points of channels."""
    shape = [int(size) for size in tensor.shape.numpy()]
    axes = weight_axes(node, 1) if precision.per_channel and node.op_type in ("MatMul", "Gemm") else None
    channels = 0 if axes is None else shape[axes[1]]
    return math.prod(shape) + 5 * channels


def is_bias(node: ir.Node, place: int) -> bool:
    """Whether an input of a node is a bias, which gets 32 bits."""
    return place == 2 and node.op_type in _WITH_BIAS


def static_bytes(node: ir.Node, place: int, tensor: ir.TensorProtocol, precision: Precision) -> int | None:
    """The bytes of a constant whose range is known, with scales and zero points of channels; None if it stays as it is.

    Scales that are numbers and no vectors are no weights. Biases have 32 bits.
    """
    if place >= _FLOATS_FROM.get(node.op_type, place + 1):
        return None
    elements = math.prod(tensor.shape.numpy())
    if is_bias(node, place):
        return elements * 4 + (8 * elements if _channels(node, precision) else 4)
    if node.op_type == "MatMul" or (place == 1 and node.op_type in _WITH_BIAS):
        channels = _channels(node, precision) if place == 1 else 0
        return elements * precision.bits // 8 + (4 + precision.bits // 8) * channels
    return elements * precision.activation_bits // 8


def _channels(node: ir.Node, precision: Precision) -> int:
    """The scales of the weight of a node; 0 where it has one, or no constant weight."""
    weight, axes = constant_of(node.inputs[1]), weight_axes(node, 1)
    if not precision.per_channel or axes is None or weight is None or len(weight.shape) < 2:
        return 0
    return int(weight.shape.numpy()[axes[1]])


class Calibrator:
    """Measures the ranges of the tensors of a part, and quantizes it with them.

    Args:
        part: The part; it is used up.
        precision: A precision of the method ``static``.
        folder: A temporary folder.
    """

    def __init__(self, part: Submodel, precision: Precision, folder: Path) -> None:
        self._part, self._precision = part, precision
        self._tool = quantizers()
        self._kinds = sorted({node.op_type for node in part.model.graph})
        self._file = folder / "part.onnx"
        write_for_tool(part.model, self._file)
        methods = self._tool.CalibrationMethod
        method = {Calibration.ENTROPY: methods.Entropy, Calibration.PERCENTILE: methods.Percentile}
        self._method = method.get(Calibration(precision.calibration), methods.MinMax)
        with quietly():
            self._calibrator = quantizers("calibrate").create_calibrator(
                self._file,
                self._kinds,
                augmented_model_path=str(folder / "augmented.onnx"),
                calibrate_method=self._method,
                use_external_data_format=_is_large(part),
                extra_options={"symmetric": precision.symmetric},
            )

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Measure one run, whose values are not kept.

        Args:
            arrays: Name of an input of the part → values.
        """
        with quietly():
            self._calibrator.collect_data(_OneRun(_Feed(arrays)))

    def quantized(self) -> tuple[ir.Model, dict[str, str]]:
        """Quantize the part with the ranges of all runs.

        Returns:
            The part; and node → tensor, for nodes that stay as they are because no range of the tensor can be divided
            into steps.
        """
        with quietly():
            ranges = self._calibrator.compute_data()
            wide = {name for name, measured in ranges.items() if not is_divisible(measured.range_value)}
            wide |= {name for name, value in self._part.weights.items() if not _is_moderate(value)}
            left: dict[str, str] = {}

            def is_left(_: onnx.ModelProto, node: onnx.NodeProto) -> bool:
                names = [name for name in (*node.input, *node.output) if name in wide]
                if names:
                    left[node.name] = names[0]
                return bool(names)

            config = self._configured(is_left)
            model = quantizers("quant_utils").load_model_with_shape_infer(self._file)
            del self._calibrator
            quantizer = quantizers("qdq_quantizer").QDQQuantizer(
                model,
                config.per_channel,
                config.reduce_range,
                config.weight_type,
                config.activation_type,
                ranges,
                [],
                config.nodes_to_exclude,
                config.op_types_to_quantize,
                config.extra_options,
            )
            made = quantizer.quantize_model()
            return model_from_proto(made), left

    def _configured(self, is_left: Any) -> Any:
        precision, types = self._precision, self._tool.QuantType
        kinds = {"int8": types.QInt8, "uint8": types.QUInt8, "int16": types.QInt16, "uint16": types.QUInt16}
        return quantizers("quantize").get_qdq_config(
            self._file,
            _OneRun({}),
            calibrate_method=self._method,
            activation_type=kinds[precision.activation],
            weight_type=kinds[precision.weight],
            activation_symmetric=precision.symmetric,
            per_channel=precision.per_channel,
            reduce_range=precision.reduce_range,
            keep_removable_activations=True,  # ONNX Runtime removes them when it loads the file
            op_types_to_quantize=self._kinds,
            nodes_to_exclude=is_left,
        )


class _Feed(dict[str, Any]):
    """The inputs of a run, which is one without inputs too: ONNX Runtime takes an empty mapping for the end of runs."""

    def __bool__(self) -> bool:
        return True


class _OneRun:
    """One run, as ONNX Runtime's calibrators read it."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._left = iter([arrays] if arrays else [])

    def get_next(self) -> Mapping[str, Array] | None:
        return next(self._left, None)


def is_divisible(measured: Iterable[Any]) -> bool:
    """Whether the bounds of a range can be divided into steps; those of values that fill masks cannot."""
    import numpy as np

    return all(bool(np.all(np.abs(np.asarray(bound, np.float64)) < _LARGEST)) for bound in measured)


def _is_moderate(value: ir.Value) -> bool:
    """Whether a weight has no value that fills masks; only small ones are read."""
    import numpy as np

    tensor = constant_of(value)
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or math.prod(tensor.shape.numpy()) > 1 << 24:
        return True
    array = tensor.numpy()
    return not array.size or bool(np.all(np.abs(array) < _LARGEST))


def _is_large(part: Submodel) -> bool:
    tensors = (constant_of(value) for value in part.weights.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) > 1 << 30
