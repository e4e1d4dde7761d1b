"""Quantize a part with ONNX Runtime's static quantizer, without the nodes that it would get wrong.

The quantizer does not check its output. So the output is checked here, and the part is quantized
again without the nodes at fault, until there are none:

- A bias that does not fit into 32 bits is clipped; its node stays in fp32.
- Operators that only move or pick values give their results the scale of their input. Results
  outside of its range (``Resize`` with cubic interpolation) would be clipped; such a node stays in
  fp32.
- The default optimizations of ONNX Runtime fuse quantized operators with others that lack some
  attributes. A node with which the part does not load stays in fp32, and so does a node on which
  the quantizer fails.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
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
"""Type in plans → name in ONNX Runtime's ``QuantType``."""

_INT32 = np.iinfo(np.int32)

_SLACK = 1 / 256
"""The share of a range by which a result may leave it: a step of 8 bits."""


@dataclass
class StaticPart:
    """A part, the ranges of its tensors, and its nodes that stay in fp32.

    Attributes:
        part: The part.
        precision: The precision of its nodes.
        name: The name of the model in errors.
        file: The part as a file.
        ranges: The ranges of its tensors.
        left: Name of a node → the reason why it stays in fp32.
        floats: Name of a node → the reason why its bias stays in fp32.
        hidden: Name of the input that replaces a bias → the bias.
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
        """The part, quantized.

        Raises:
            PartError: The quantizer gets a node wrong although it was told to leave it.
        """
        model = self._without_faulty()
        while wrong := self._clipped(model.graph) | self._outside(model.graph):
            if wrong.keys() <= self.left.keys():
                # The next attempt would be the same: the loop ends because `left` grows.
                raise PartError(next(iter(wrong.values())))
            self.left |= wrong
            model = self._without_faulty()
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
        """Quantize the nodes that are not left; faulty nodes are left, too."""
        while True:
            self._follow_producers()
            nodes = [name for name in self.part.nodes if name not in self.left]
            try:
                model, faulty = without_faulty(nodes, self._quantized, self._kinds)
            except PartError as failure:
                raise tool_error(self.name, failure) from failure
            if model is not None and not faulty:
                return model
            # Again: their activation functions are left with them. All of them are new in `left`.
            for name, why in faulty.items():
                self.left[name] = f"ONNX Runtime fails on {named(self.part.nodes[name])}: {why}"

    def _kinds(self, name: str) -> tuple[str, str]:
        return kinds_of(self.part.nodes[name])

    def _follow_producers(self) -> None:
        """Leave activation functions whose producers are left, for the same reason."""
        followers = self.precision.how.with_producer
        for node in self.part.model.graph:
            value = node.inputs[0] if node.op_type in followers else None
            producer = None if value is None else value.producer()
            if producer is not None and producer.name in self.left:
                self.left.setdefault(str(node.name), self.left[producer.name])

    def _quantized(self, nodes: Sequence[str]) -> ir.Model:
        """Quantize some of the nodes; a `PartError` if that fails, or the output does not load."""
        in_text = self.part.names.in_text
        with tool_failures(in_text), quietly():
            proto = self._run_quantizer(frozenset(nodes))
        try:
            model = model_from_proto(proto)
            with temporary_folder() as folder:
                Session(RunnableModel.of(model, self.name, folder))
        except InputError as error:  # it is not valid, or ONNX Runtime does not load it
            raise PartError(in_text(described(error))) from error
        return model

    def _run_quantizer(self, chosen: Container[str]) -> onnx.ModelProto:
        # The steps of `quantize_static`, which would measure the ranges itself, in each attempt.
        precision, types = self.precision, quantizers().QuantType
        model = quantizers("quant_utils").load_model_with_shape_infer(self.file)
        config = quantizers("quantize").get_qdq_config(
            model,
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
            model,
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
        proto: onnx.ModelProto = quantizer.quantize_model()
        return proto

    def _clipped(self, graph: ir.Graph) -> dict[str, str]:
        """Name of a node → the reason why it stays, for nodes whose biases were clipped.

        It does not help to keep the bias in fp32: ONNX Runtime converts it to the same integers
        when it optimizes the model.
        """
        wrong: dict[str, str] = {}
        for node in graph:
            tensor = constant_of(node.inputs[0]) if node.op_type == "DequantizeLinear" else None
            if tensor is None or tensor.dtype != ir.DataType.INT32:
                continue
            # The quantizer clips to the limits: a value at a limit may have been larger.
            if not np.isin(tensor.numpy(), (_INT32.min, _INT32.max)).any():
                continue
            for use in node.outputs[0].uses():
                name = str(use.node.name)
                if is_bias(use.node, use.idx) and name in self.part.nodes:
                    owner = named(self.part.nodes[name])
                    wrong[name] = f"ONNX Runtime would clip the bias of {owner} to int32"
        return wrong

    def _outside(self, graph: ir.Graph) -> dict[str, str]:
        """Name of a node → the reason why it stays: results exceed the range of its input."""
        wrong: dict[str, str] = {}
        source = self.part.names.source
        for node in graph:
            if node.op_type != "QuantizeLinear":
                continue
            tensor, scale, point = node.inputs
            assert tensor is not None
            assert scale is not None
            tensor_name = source(str(tensor.name))
            if source(str(scale.name)) == tensor_name:
                continue  # the scale is of its own range
            measured = self.ranges.bounds.get(tensor_name or "")
            producer = tensor.producer()
            name = "" if producer is None else str(producer.name)
            if measured is None or name not in self.part.nodes:
                continue
            if not _contains(constant_of(scale), constant_of(point), measured):
                problem = f"results of {named(self.part.nodes[name])} leave the range of its input"
                wrong[name] = f"{problem}, whose scale ONNX Runtime gives them"
        return wrong


def _contains(
    scale: ir.TensorProtocol | None, point: ir.TensorProtocol | None, measured: tuple[Array, Array]
) -> bool:
    """Whether the integers of a scale and a zero point represent all values of a measured range."""
    if scale is None or point is None:
        return True
    step = scale.numpy().astype(np.float64)
    limits = np.iinfo(point.numpy().dtype)
    zero = point.numpy().astype(np.float64)
    least, most = (limits.min - zero) * step, (limits.max - zero) * step
    slack = _SLACK * (most - least)
    low, high = measured
    return bool((low >= least - slack).all() and (high <= most + slack).all())
