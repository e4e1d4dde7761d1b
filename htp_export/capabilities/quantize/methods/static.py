"""Integers with ranges measured ahead, in QuantizeLinear and DequantizeLinear: ONNX Runtime's static quantizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.method import Method
from htp_export.capabilities.quantize.ort_quantizers import OneRun, quantizers, quietly
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.errors import InputError
from htp_export.files.filesystem import temporary_folder
from htp_export.files.model_files import write_for_tool
from htp_export.files.parsing import model_from_proto
from htp_export.shapes.operator_kinds import subgraphs
from htp_export.weights.products import weight_axes

_LARGEST = 1e30
"""Ranges up to here are divided into steps. Masks are filled with numbers near the largest float, or infinity: in 256
steps between these and 0, all other values would be 0."""

_LARGE_PART = 1 << 30
"""Bytes of weights from which on they are beside the file that is calibrated: protobuf ends at 2 GiB."""

_FIRST_QDQ, _FIRST_PER_CHANNEL = 10, 13  # opsets
_WITH_BIAS = frozenset(
    ("Conv", "ConvTranspose", "Gemm", "LayerNormalization", "InstanceNormalization", "BatchNormalization")
)
_FLOATS_FROM = {"BatchNormalization": 3, "Resize": 1}
"""Inputs from this place on stay floats."""

TYPES = {"int8": "QInt8", "uint8": "QUInt8", "int16": "QInt16", "uint16": "QUInt16"}
CALIBRATIONS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}


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
    def first_opset(self) -> int:
        return _FIRST_PER_CHANNEL if self.precision.per_channel else _FIRST_QDQ

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether the quantizer knows the operator, and reads or makes floats."""
        registry = quantizers("registry")
        known = {*registry.QDQRegistry, *registry.QLinearOpsRegistry}
        return not node.domain and node.op_type in known and not subgraphs(node) and facts.has_floats(node)

    def bytes_of(self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts) -> int | None:
        """The bytes of a constant; scales that are numbers and no vectors are no weights. Biases have 32 bits."""
        if place >= _FLOATS_FROM.get(node.op_type, place + 1):
            return None
        elements, bits = math.prod(tensor.shape.numpy()), self.precision.bits
        if _is_bias(node, place):
            return elements * 4 + (8 * elements if self.channels(node) else 4)
        if node.op_type == "MatMul" or (place == 1 and node.op_type in _WITH_BIAS):
            channels = self.channels(node) if place == 1 else 0
            return elements * bits // 8 + (4 + bits // 8) * channels
        return elements * self.precision.activation_bits // 8

    def channels(self, node: ir.Node) -> int:
        """The scales of the weight of a node; 0 where it has one, or no constant weight."""
        weight, axes = constant_of(node.inputs[1]), weight_axes(node, 1)
        if not self.precision.per_channel or axes is None or weight is None or len(weight.shape) < 2:
            return 0
        return int(weight.shape.numpy()[axes[1]])

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        return node if _is_bias(node, place) else super().shared_by(node, place)

    def quantize(self, part: Submodel, work: Work) -> tuple[ir.Model, str]:
        with temporary_folder() as folder:
            file = folder / "part.onnx"
            kinds = sorted({node.op_type for node in part.model.graph})
            write_for_tool(part.model, file)
            ranges = self._ranges(part, file, kinds, work)
            bounds = {name: measured.range_value for name, measured in ranges.items()}
            computed = (str(value.name) for node in part.model.graph for value in node.outputs)
            for name in filter(bounds.get, computed):
                if any(np.isnan(bound).any() for bound in bounds[name]):
                    raise InputError(f"data: the model computes NaN in {name!r}; its range is not known")
            wide = {name for name, each in bounds.items() if not is_divisible(each)}
            wide |= {name for name, value in part.weights.items() if not _is_moderate(value)}
            made, left = self._with_ranges(file, kinds, ranges, wide)
        tensors = sorted(set(left.values()))
        listed = ", ".join(tensors[:3]) + (", ..." if len(tensors) > 3 else "")
        why = f"values of {listed} fill masks and cannot be divided into the steps of {self.precision.name}"
        return made, f"{len(left)} nodes stay in fp32: {why}" if left else ""

    @property
    def _calibration(self) -> Any:
        return quantizers().CalibrationMethod[CALIBRATIONS[self.precision.calibration]]

    def _ranges(self, part: Submodel, file: Path, kinds: list[str], work: Work) -> Any:
        """The ranges of the tensors of a part in all runs, which are in memory one at a time."""
        tensors = (constant_of(value) for value in part.weights.values())
        size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        with quietly():
            calibrator = quantizers("calibrate").create_calibrator(
                file,
                kinds,
                augmented_model_path=str(file.with_name("augmented.onnx")),
                calibrate_method=self._calibration,
                use_external_data_format=size > _LARGE_PART,
                extra_options={"symmetric": self.precision.symmetric},
            )
        with work.runs(part) as runs:
            for arrays in runs:
                with self._measuring():
                    calibrator.collect_data(OneRun(arrays))
        with self._measuring():
            return calibrator.compute_data()

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[None]:
        """Call a calibrator; numpy has no histogram of values that fill masks, nor of a range without a width."""
        try:
            with quietly():
                yield
        except ValueError as error:
            if "bins" not in str(error):
                raise
            raise self.precision.fault(
                f"calibration {self.precision.calibration!r} has no histogram of values as large as those that fill "
                "masks; calibrate with minmax, or leave these modules in fp32"
            ) from error

    def _with_ranges(
        self, file: Path, kinds: list[str], ranges: Any, wide: set[str]
    ) -> tuple[ir.Model, Mapping[str, str]]:
        """A part, quantized; and node → tensor, for nodes that stay because no range of the tensor can be divided."""
        left: dict[str, str] = {}

        def is_left(_: onnx.ModelProto, node: onnx.NodeProto) -> bool:
            names = [name for name in (*node.input, *node.output) if name in wide]
            if names:
                left[node.name] = names[0]
            return bool(names)

        precision, types = self.precision, quantizers().QuantType
        with quietly():
            config = quantizers("quantize").get_qdq_config(
                file,
                None,  # the ranges are measured
                calibrate_method=self._calibration,
                activation_type=types[TYPES[precision.activation]],
                weight_type=types[TYPES[precision.weight]],
                activation_symmetric=precision.symmetric,
                per_channel=precision.per_channel,
                reduce_range=precision.reduce_range,
                keep_removable_activations=True,  # ONNX Runtime removes them when it loads the file
                op_types_to_quantize=kinds,
                nodes_to_exclude=is_left,
            )
            quantizer = quantizers("qdq_quantizer").QDQQuantizer(
                quantizers("quant_utils").load_model_with_shape_infer(file),
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
            return model_from_proto(quantizer.quantize_model()), left


METHOD = Static


def _is_bias(node: ir.Node, place: int) -> bool:
    """Whether an input of a node is a bias, which gets 32 bits."""
    return place == 2 and node.op_type in _WITH_BIAS


def is_divisible(bounds: Iterable[Any]) -> bool:
    """Whether the bounds of a range can be divided into steps; those of values that fill masks cannot."""
    return all(bool(np.all(np.abs(np.asarray(bound, np.float64)) < _LARGEST)) for bound in bounds)


def _is_moderate(value: ir.Value) -> bool:
    """Whether a weight has no value that fills masks; only small ones are read."""
    tensor = constant_of(value)
    return (
        tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size > 1 << 24 or is_divisible([tensor.numpy()])
    )
