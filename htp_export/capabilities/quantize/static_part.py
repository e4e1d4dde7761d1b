"""A part that ONNX Runtime's static quantizer quantizes, without what it would get wrong.

The quantizer looks at no results. So what it made is looked through, and it is made again until
nothing is wrong:

- A bias that does not fit into 32 bits is clipped; its node stays in fp32.
- Operators that only move or pick values give their results the scale of their input. Results outside of its range
  (``Resize`` with cubic interpolation) would be clipped; such a node stays in fp32.
- The default optimizations of ONNX Runtime fuse quantized operators with others that lack some attributes. A node with
  which the part does not load stays in fp32, and so does one on which the quantizer fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.calibrating import Ranges, calibration_method
from htp_export.capabilities.quantize.method import Made, Precision
from htp_export.capabilities.quantize.ort_quantizers import (
    PartError,
    kinds_of,
    quantizers,
    quietly,
    tool_error,
    tool_failures,
    without_faulty,
)
from htp_export.capabilities.quantize.rounding_recipes import (
    float_weights,
    record_biases,
    record_ranges,
    record_rounding,
)
from htp_export.capabilities.quantize.static_biases import is_bias, show_biases
from htp_export.capabilities.quantize.work import named
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.errors import InputError, described
from htp_export.files.filesystem import temporary_folder
from htp_export.files.parsing import model_from_proto
from htp_export.runtime.arrays import Array
from htp_export.runtime.sessions import RunnableModel, Session

TYPES = {"int8": "QInt8", "uint8": "QUInt8", "int16": "QInt16", "uint16": "QUInt16"}
"""Types of plans → names of ONNX Runtime's types."""

_INT32 = np.iinfo(np.int32)

_SLACK = 1 / 256
"""Share of a range by which a result may leave it: a step of 8 bits, by which all results are rounded."""


@dataclass
class StaticPart:
    """A part, the ranges of its tensors, and what of it stays in fp32.

    Attributes:
        part: The part.
        precision: What it gets.
        name: The name of the model in errors.
        file: The part as a file.
        ranges: Those of its tensors.
        left: Name of a node → why it stays.
        floats: Name of a node → why its bias stays.
        hidden: Name of an input that stands for a bias → the bias.
    """

    part: Submodel
    precision: Precision
    name: str
    file: Path
    ranges: Ranges
    left: dict[str, str]
    floats: Mapping[str, str]
    hidden: Mapping[str, ir.Value]

    def made(self) -> Made:
        """The part, quantized."""
        while True:
            model = self._without_faulty()
            wrong = self._clipped(model.graph) | self._outside(model.graph)
            if not wrong:
                break
            self.left |= wrong
        weights = float_weights(self.part.model.graph)
        record_rounding(model.graph, weights)
        record_biases(model.graph, weights)
        record_ranges(model.graph, self.ranges.bounds)
        show_biases(model.graph, self.hidden)
        partly: dict[str, str] = {}
        for name, why in self.floats.items():
            if name not in self.left:
                partly[name] = f"the bias of {named(self.part.nodes[name])} stays in fp32: {why}"
        return Made(model, self.left, partly)

    def _without_faulty(self) -> ir.Model:
        """What the quantizer makes of the nodes that do not stay; those on which it fails stay, too."""
        while True:
            self._follow_producers()
            nodes = [name for name in self.part.nodes if name not in self.left]
            try:
                model, faulty = without_faulty(nodes, self._quantized, self._kinds)
            except PartError as failure:
                raise tool_error(self.name, failure) from failure
            if model is not None and not faulty:
                return model
            for name, why in faulty.items():
                self.left[name] = f"ONNX Runtime fails on {named(self.part.nodes[name])}: {why}"

    def _kinds(self, name: str) -> tuple[str, str]:
        return kinds_of(self.part.nodes[name])

    def _follow_producers(self) -> None:
        """Leave activation functions whose producers stay, for the same reason."""
        for node in self.part.model.graph:
            value = node.inputs[0] if node.op_type in self.precision.how.with_producer else None
            maker = None if value is None else value.producer()
            if maker is not None and maker.name in self.left:
                self.left.setdefault(str(node.name), self.left[maker.name])

    def _quantized(self, nodes: Sequence[str]) -> ir.Model:
        """What the quantizer makes of some of the nodes, if ONNX Runtime loads it."""
        precision, types, chosen = self.precision, quantizers().QuantType, frozenset(nodes)
        told = self.part.names.in_text
        with tool_failures(told), quietly():
            given = quantizers("quant_utils").load_model_with_shape_infer(self.file)
            config = quantizers("quantize").get_qdq_config(
                given,
                None,  # the ranges are measured
                calibrate_method=calibration_method(precision.calibration),
                activation_type=types[TYPES[precision.activation]],
                weight_type=types[TYPES[precision.weight]],
                activation_symmetric=precision.symmetric,
                per_channel=precision.per_channel,
                reduce_range=precision.reduce_range,
                keep_removable_activations=True,  # ONNX Runtime removes them when it loads the file
                op_types_to_quantize=sorted({node.op_type for node in self.part.model.graph}),
                nodes_to_exclude=[name for name in self.part.nodes if name not in chosen],
            )
            quantizer = quantizers("qdq_quantizer").QDQQuantizer(
                given,
                config.per_channel,
                config.reduce_range,
                config.weight_type,
                config.activation_type,
                self.ranges.for_quantizer(),
                [],
                config.nodes_to_exclude,
                config.op_types_to_quantize,
                config.extra_options,
            )
            proto = quantizer.quantize_model()
        try:
            model = model_from_proto(proto)
            with temporary_folder() as folder:
                Session(RunnableModel.of(model, self.name, folder))
        except InputError as error:  # it is not valid, or ONNX Runtime does not load it
            raise PartError(told(described(error))) from error
        return model

    def _clipped(self, graph: ir.Graph) -> dict[str, str]:
        """Name of a node → why it stays, for nodes whose biases are clipped.

        A bias in fp32 is no help: ONNX Runtime makes the same integers of it when it optimizes the
        model.
        """
        found: dict[str, str] = {}
        for node in graph:
            tensor = constant_of(node.inputs[0]) if node.op_type == "DequantizeLinear" else None
            if tensor is None or tensor.dtype != ir.DataType.INT32:
                continue
            if not np.isin(tensor.numpy(), (_INT32.min, _INT32.max)).any():
                continue
            for use in node.outputs[0].uses():
                name = str(use.node.name)
                if is_bias(use.node, use.idx) and name in self.part.nodes:
                    found[name] = (
                        f"ONNX Runtime would clip the bias of {named(self.part.nodes[name])} to int32"
                    )
        return found

    def _outside(self, graph: ir.Graph) -> dict[str, str]:
        """Name of a node → why it stays, for nodes whose results leave the range of the scale of their input."""
        found: dict[str, str] = {}
        for node in graph:
            if node.op_type != "QuantizeLinear":
                continue
            tensor, scale, point = node.inputs
            assert tensor is not None
            assert scale is not None
            names = self.part.names
            measured, maker = (
                self.ranges.bounds.get(names.source(str(tensor.name)) or ""),
                tensor.producer(),
            )
            is_own = names.source(str(scale.name)) == names.source(str(tensor.name))
            node_name = "" if maker is None else str(maker.name)
            if is_own or measured is None or node_name not in self.part.nodes:
                continue
            if not _holds(constant_of(scale), constant_of(point), measured):
                said = (
                    f"results of {named(self.part.nodes[node_name])} leave the range of its input"
                )
                found[node_name] = f"{said}, whose scale ONNX Runtime gives them"
        return found


def _holds(
    scale: ir.TensorProtocol | None, point: ir.TensorProtocol | None, measured: tuple[Array, Array]
) -> bool:
    """Whether the integers of a scale and a zero point stand for all values of a range."""
    if scale is None or point is None:
        return True
    step, zero = scale.numpy().astype(np.float64), point.numpy()
    limits = np.iinfo(zero.dtype)
    least, most = ((limit - zero.astype(np.float64)) * step for limit in (limits.min, limits.max))
    slack = _SLACK * (most - least)
    low, high = measured
    return bool((low >= least - slack).all() and (high <= most + slack).all())
