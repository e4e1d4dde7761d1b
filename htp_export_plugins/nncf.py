"""NNCF as an engine of `quantize`: ``nncf.quantize`` and ``compress_weights`` for chosen modules.

``METHODS`` is the interface for ``htp_export.capabilities.quantize.method``. NNCF only sees the
nodes to be quantized, so that it cannot change others, or merge their scales. Its result is checked,
loaded and run before it is accepted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import htp_export
from htp_export.capabilities.quantize.calibrating import is_divisible
from htp_export.capabilities.quantize.method import Made, Method, Precision
from htp_export.capabilities.quantize.methods.static import Static, channel_axis
from htp_export.capabilities.quantize.methods.weights import Blocks, sizes_in_blocks
from htp_export.capabilities.quantize.weight_operators import write_products
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.errors import HtpExportError, ToolError, described
from htp_export.extras import required
from htp_export.files.parsing import model_from_proto
from htp_export.process.quiet import quiet
from htp_export.runtime.arrays import Array
from htp_export.runtime.runner import Runner
from htp_export.runtime.settings import DEFAULTS
from htp_export.shapes.operator_kinds import subgraphs
from htp_export.weights.products import weight_axes, weight_place

__all__ = ["METHODS"]

_WEIGHTED = frozenset(("Conv", "ConvTranspose", "MatMul", "Gemm", "Gather"))
_OWN = Path(htp_export.__file__).parent

_BLOCKS_FROM = (
    21  # the first opset whose DequantizeLinear has blocks; before it, NNCF writes MatMulNBits
)
_MICROSOFT = "com.microsoft"
_SCALED_NODES = 2  # an activation function and a Mul between two products

Metric = Callable[[onnx.ModelProto], float]
"""The metric of the whole model with a quantized part."""


class Activations(Static):
    """``nncf.quantize``; with ``max_drop``, ``nncf.quantize_with_accuracy_control``."""

    activations = ("int8",)
    weights = ("int8",)
    calibrations = ("minmax",)
    options = ("smooth_quant", "bias_correction", "max_drop")

    def check(self) -> None:
        _check_switches(self.precision, ("smooth_quant", "bias_correction"))
        drop = self.precision.options.get("max_drop")
        is_number = isinstance(drop, int | float) and not isinstance(drop, bool)
        if drop is not None and not (is_number and drop >= 0):
            raise self.precision.fault(f"max_drop is {drop!r}, not a number from 0 up")

    readings = 2  # all runs of the inputs of a part are in memory

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether NNCF quantizes the inputs: activations and weights, or rows of a table."""
        groups = _nncf("onnx.graph.metatypes.groups")
        known = set[str]()
        for operator in groups.INPUTS_QUANTIZABLE_OPERATIONS:
            known.update(operator.get_all_aliases())
        is_table = node.op_type == "Gather" and constant_of(node.inputs[0]) is not None
        if node.domain or subgraphs(node) or not (node.op_type in known or is_table):
            return False
        return facts.has_floats(node)

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        if node.op_type not in _WEIGHTED or place != weight_place(node):
            return None  # biases are not quantized
        if node.op_type != "Gather":
            return super().bytes_of(node, place, tensor, facts)
        shape = [int(size) for size in tensor.shape.numpy()]
        # A scale of four bytes and a zero point of one byte for each row.
        scales = 5 * shape[0] if self.precision.per_channel else 0
        return math.prod(shape) + scales

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        return None  # NNCF chooses it

    def channels(self, node: ir.Node, place: int = 1) -> int:
        return self.scales_along(channel_axis(node), constant_of(node.inputs[place]))

    def quantize(self, part: Submodel, work: Work) -> Made:
        precision = self.precision
        metric = None
        control = work.validation
        with work.runs(part) as read:
            runs = list(read)
        if control is not None and precision.max_drop is not None:
            budget = control.budget(work.model, precision.max_drop, precision.name)
            options = {**precision.options, "max_drop": budget}
            precision = dataclasses.replace(precision, options=options)

            def metric(made: onnx.ModelProto) -> float:
                return control.with_part(work.changed, part, made)

        original = part.proto()
        _put_onnx_first(original)  # NNCF takes the first opset for that of ONNX
        expected, wide = _measured(part, original, runs)
        ignored = [
            str(node.name)
            for node in part.model.graph
            if wide.intersection(_names(node.inputs, node.outputs))
        ]
        arguments = _quantize_arguments(precision, ignored, len(runs))
        data = _nncf().Dataset(list(runs))
        parameters = _parameters(precision)
        with _calling_nncf(precision):
            if metric is None:
                made = _nncf().quantize(original, data, advanced_parameters=parameters, **arguments)
            else:
                made = _controlled(original, data, parameters, arguments, precision, metric)
        model = _checked(made, expected, runs[0])
        left = _left(part, model, ignored)
        reason = "NNCF leaves them, or values that they read or make fill masks and cannot be divided into the steps of"
        reason = f"{reason} {precision.name}"
        if precision.max_drop is not None:
            reason += ", or the metric would fall by more than max_drop"
        return Made(model, dict.fromkeys(left, reason))


def _quantize_arguments(
    precision: Precision, ignored: list[str], sample_count: int
) -> dict[str, Any]:
    """The arguments of ``nncf.quantize`` for a precision."""
    nncf = _nncf()
    preset = nncf.QuantizationPreset
    # SmoothQuant is for transformers: NNCF runs it only for models of this type.
    smooth = precision.options.get("smooth_quant")
    return {
        "preset": preset.PERFORMANCE if precision.symmetric else preset.MIXED,
        "model_type": nncf.ModelType.TRANSFORMER if smooth else None,
        "subset_size": sample_count,
        "ignored_scope": nncf.IgnoredScope(names=ignored, validate=False),
    }


class Weights(Method):
    """``nncf.compress_weights``, with all weights in one precision."""

    activations = ("float32",)
    weights = ("int4", "int8")
    options = ("awq", "scale_estimation")
    order = 1
    first_opset = 13

    def check(self) -> None:
        _check_switches(self.precision, self.options)
        for name in self.precision.options:
            if self.precision.weight != "int4" and self.precision.options[name]:
                raise self.precision.fault(f"{name} is for int4 only")

    @property
    def calibrated(self) -> bool:
        return any(self.precision.options.values())

    readings = 2  # without calibration, one run is used for the check

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether NNCF compresses the constant weight of a node.

        In 4 bits, it compresses products whose blocks are all full: NNCF refuses others, and its
        tables do not load. In 8 bits, it compresses convolutions and tables, too.
        """
        _nncf()
        bits = self.precision.bits
        size = self.precision.block_size
        if node.domain or subgraphs(node):
            return False
        if node.op_type in ("MatMul", "Gemm"):
            takes = facts.has_floats(node) and Blocks(self.precision).takes(node, facts)
            return takes and (bits == 8 or sizes_in_blocks(node)[0] % size == 0)
        if bits != 8 or node.op_type not in _WEIGHTED or len(node.inputs) <= weight_place(node):
            return False
        weight = constant_of(node.inputs[weight_place(node)])
        if weight is None or weight.dtype != ir.DataType.FLOAT:
            return False
        if node.op_type != "Gather":
            return True
        return len(weight.shape) == 2 and node.attributes.get_int("axis", 0) == 0

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        if place != weight_place(node):
            return None
        shape = [int(size) for size in tensor.shape.numpy()]
        symmetric = self.precision.symmetric
        elements = math.prod(shape)
        if self.precision.bits == 8:
            axes = weight_axes(node, 1)  # a table has a scale for each row
            return elements + shape[0 if axes is None else axes[1]] * (4 if symmetric else 5)
        along, across = sizes_in_blocks(node)
        blocks = along // self.precision.block_size
        zero_points = 0
        if not symmetric and facts.opset < _BLOCKS_FROM:
            zero_points = across * ((blocks + 1) // 2)  # each channel begins with a new byte
        elif not symmetric:
            zero_points = (blocks * across + 1) // 2
        return (elements + 1) // 2 + 4 * blocks * across + zero_points

    def groups(self, nodes: Sequence[ir.Node], work: Work) -> Iterable[Sequence[ir.Node]]:
        if self.precision.options.get("awq"):
            return [_scaled_before(nodes, work.planned, self.precision)]
        return [nodes]

    def quantize(self, part: Submodel, work: Work) -> Made:
        with work.runs(part) as read:
            runs = list(read if self.calibrated else islice(read, 1))
        weighted = [str(node.name) for node in part.model.graph if self.takes(node, work.facts)]
        if self.precision.bits == 4:
            # NNCF writes the blocks of a Gemm's weight along the wrong axis.
            write_products(part.model.graph)
        original = part.proto()
        _put_onnx_first(original)
        outputs = [str(value.name) for value in part.model.graph.outputs]
        with Runner(part.model, "the part for NNCF", DEFAULTS).opened(outputs) as run:
            expected = run(runs[0])
        with _calling_nncf(self.precision):
            made: onnx.ModelProto = _nncf().compress_weights(original, **self._arguments(runs))
        _repair(made)
        model = _checked(made, expected, runs[0])
        left = [name for name in weighted if not _is_compressed(model, name)]
        return Made(model, dict.fromkeys(left, "NNCF leaves them"))

    def _arguments(self, runs: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        """The arguments of ``nncf.compress_weights`` for the precision."""
        nncf = _nncf()
        precision = self.precision
        kind = "SYM" if precision.symmetric else "ASYM"
        mode = getattr(nncf.CompressWeightsMode, f"INT{precision.bits}_{kind}")
        if precision.bits == 8:
            return {"mode": mode}
        arguments = {
            "mode": mode,
            "group_size": precision.block_size,
            "ratio": 1.0,
            "all_layers": True,
        }
        if self.calibrated:
            fitted = {name: precision.options.get(name, False) for name in self.options}
            arguments |= {"dataset": nncf.Dataset(list(runs)), "subset_size": len(runs), **fitted}
        return arguments


METHODS: Mapping[str, type[Method]] = {"static": Activations, "weights": Weights}


def _nncf(module: str = "") -> Any:
    """NNCF, or a module of it; raises `InputError` if it is not installed."""
    return required(f"nncf.{module}" if module else "nncf", "engine 'nncf'")


def _check_switches(precision: Precision, names: Iterable[str]) -> None:
    for name in names:
        precision.check(name, precision.options.get(name, False), (False, True))


def _controlled(
    original: onnx.ModelProto,
    data: Any,
    parameters: Any,
    arguments: Mapping[str, Any],
    precision: Precision,
    metric: Metric,
) -> onnx.ModelProto:
    """Quantize with accuracy control.

    The validation data is one sample, because a metric need not be defined for single samples.
    """
    nncf = _nncf()
    advanced = _nncf("quantization.advanced_parameters")

    def validate(candidate: onnx.ModelProto, samples: Iterable[Any]) -> tuple[float, list[float]]:
        number = metric(candidate)
        return number, [number for _ in samples]

    made: onnx.ModelProto = nncf.quantize_with_accuracy_control(
        original,
        data,
        nncf.Dataset([0]),
        validate,
        max_drop=precision.max_drop,
        drop_type=nncf.DropType.ABSOLUTE,
        advanced_quantization_parameters=parameters,
        advanced_accuracy_restorer_parameters=advanced.AdvancedAccuracyRestorerParameters(
            num_ranking_workers=1
        ),
        **arguments,
    )
    return made


def _parameters(precision: Precision) -> Any:
    """NNCF's advanced parameters for a precision.

    Ranges cover all values; they are not the means of the runs' ranges.
    """
    advanced = _nncf("quantization.advanced_parameters")
    overflow = "DISABLE"
    if precision.reduce_range:
        overflow = "ENABLE"
    estimators = _nncf("quantization.range_estimator").RangeEstimatorParametersSet
    return advanced.AdvancedQuantizationParameters(
        overflow_fix=getattr(advanced.OverflowFix, overflow),
        disable_bias_correction=not precision.options.get("bias_correction", False),
        weights_quantization_params=advanced.QuantizationParameters(
            per_channel=precision.per_channel
        ),
        activations_range_estimator_params=estimators.MINMAX,
    )


@contextlib.contextmanager
def _calling_nncf(precision: Precision) -> Iterator[None]:
    """Run NNCF without its output and logs; raise its own errors as `ToolError`."""
    try:
        with quiet("", "nncf"):
            yield
    except HtpExportError:
        raise
    except Exception as error:
        if not _is_of_nncf(error):
            raise
        raise ToolError(
            "nncf", f"failed on the modules of {precision.name!r}: {described(error)}"
        ) from error


def _is_of_nncf(error: Exception) -> bool:
    """Whether an error is from NNCF or a library of it, and not from a callback into htp_export."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if "nncf" in file.parts or file.is_relative_to(_OWN):
            return "nncf" in file.parts
    return True


def _checked(
    made: onnx.ModelProto, expected: Mapping[str, Array], feed: Mapping[str, Array]
) -> ir.Model:
    """NNCF's result, if it runs with similar outputs; raises `ToolError` otherwise."""
    try:
        onnx.checker.check_model(made)
        model = model_from_proto(made)
        with Runner(model, "the result", DEFAULTS).opened(list(expected)) as run:
            outputs = run(feed)
    except Exception as error:
        raise ToolError("nncf", f"made an invalid model: {described(error)}") from error
    for name, before in expected.items():
        after = outputs.get(name)
        if after is None or after.shape != before.shape or after.dtype != before.dtype:
            raise ToolError(
                "nncf",
                f"made a model whose output {name!r} is missing, or has another shape or type",
            )
        if np.isfinite(before).all() and not np.isfinite(after).all():
            raise ToolError("nncf", f"made a model whose output {name!r} is not finite")
    return model


def _measured(
    part: Submodel, original: onnx.ModelProto, runs: Sequence[Mapping[str, Array]]
) -> tuple[dict[str, Array], set[str]]:
    """The outputs of the first run, and the tensors whose range cannot be divided into steps."""
    model = model_from_proto(original)
    output_names = [str(value.name) for value in model.graph.outputs]
    computed = _names(*(node.outputs for node in model.graph))
    wide = set[str]()
    for value in model.graph.initializers.values():
        if value.const_value and _is_wide(value.const_value.numpy()):
            wide.add(str(value.name))
    expected: dict[str, Array] = {}
    with Runner(model, "the part for NNCF", DEFAULTS, use_up=True).opened(computed) as run:
        for feed in runs:
            results = run(feed)
            for name, array in (*feed.items(), *results.items()):
                if _is_wide(array):
                    wide.add(name)
            expected = expected or {name: results[name] for name in output_names}
    return expected, wide


def _is_wide(array: Array) -> bool:
    """Whether the range of an array cannot be divided into steps."""
    floats = np.issubdtype(array.dtype, np.floating) and array.size
    return bool(floats) and not is_divisible((array.min(), array.max()))


def _left(part: Submodel, made: ir.Model, ignored: Collection[str]) -> list[str]:
    """The nodes of a part without quantized inputs, except after quantized ones, like biases."""
    names = {node.name for node in part.model.graph}
    quantized = set[ir.Node]()
    left = list[str]()
    for node in made.graph:
        if node.name not in names:
            continue
        producers = {value.producer() for value in node.inputs if value is not None}
        from_integers = any(map(_is_dequantize, producers))
        if node.name not in ignored and (from_integers or quantized.intersection(producers)):
            quantized.add(node)
        else:
            left.append(str(node.name))
    return left


def _is_dequantize(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "DequantizeLinear"


def _names(*values: Sequence[ir.Value | None]) -> list[str]:
    return [str(value.name) for listed in values for value in listed if value is not None]


def _scaled_before(
    nodes: Sequence[ir.Node], allowed: Mapping[ir.Node, object], precision: Precision
) -> list[ir.Node]:
    """The nodes before products that AWQ needs: it divides their results by the scales of weights.

    Only nodes whose result has no other consumer, and which have the same precision in the plan
    (``allowed``).
    """
    group = dict.fromkeys(nodes)
    edge = [node.inputs[0] for node in nodes]
    for _ in range(_SCALED_NODES):
        producers = dict.fromkeys(value.producer() for value in edge if value is not None)
        candidates = [node for node in producers if node is not None and node not in group]
        new = []
        for node in candidates:
            is_near = node.graph is nodes[0].graph and allowed.get(node) == precision
            if is_near and _has_single_consumer(node):
                new.append(node)
        group.update(dict.fromkeys(new))
        edge = [value for node in new for value in node.inputs]
    order = {node: index for index, node in enumerate(nodes[0].graph or ())}
    return sorted(group, key=order.__getitem__)


def _has_single_consumer(node: ir.Node) -> bool:
    """Whether a node without weights has one output with one consumer, which may be scaled."""
    # NNCF would compress weights of the node, too.
    if node.op_type in _WEIGHTED or subgraphs(node) or len(node.outputs) != 1:
        return False
    return len(node.outputs[0].uses()) == 1 and not node.outputs[0].is_graph_output()


def _repair(made: onnx.ModelProto) -> None:
    """Write fields that NNCF 3.4 omits.

    ``MatMulNBits`` needs an opset import, and zero points packed in pairs. The scales of the
    channels of a convolution are a vector.
    """
    operators = [node for node in made.graph.node if node.domain == _MICROSOFT]
    if operators and all(entry.domain != _MICROSOFT for entry in made.opset_import):
        made.opset_import.append(onnx.helper.make_opsetid(_MICROSOFT, 1))
    tensors = {tensor.name: tensor for tensor in made.graph.initializer}
    for node in made.graph.node:
        inputs = [tensors.get(name) for name in node.input]
        sizes = {attribute.name: attribute.i for attribute in node.attribute}
        if node in operators and len(inputs) > 3 and inputs[3] is not None:
            _pack(inputs[3], sizes)
        elif node.op_type == "DequantizeLinear" and not sizes.get("block_size"):
            for tensor in inputs[1:]:
                _flatten_vector(tensor)


def _flatten_vector(tensor: onnx.TensorProto | None) -> None:
    """Remove dimensions of size 1 from a tensor with a single other dimension."""
    if tensor is None or len(tensor.dims) < 2:
        return
    if max(tensor.dims) == math.prod(tensor.dims):
        tensor.dims[:] = [max(tensor.dims)]


def _pack(points: onnx.TensorProto, sizes: Mapping[str, int]) -> None:
    """Pack zero points of four bits in pairs, along the blocks."""
    blocks = sizes["K"] // sizes["block_size"]
    is_unpacked = list(points.dims) == [sizes["N"], blocks]
    if sizes["bits"] != 4 or not is_unpacked or blocks < 2:
        return
    array = onnx.numpy_helper.to_array(points)
    even = np.pad(array, ((0, 0), (0, blocks % 2)))
    packed = even[:, ::2] | even[:, 1::2] << 4
    points.CopyFrom(onnx.numpy_helper.from_array(packed, points.name))


def _is_compressed(model: ir.Model, name: str) -> bool:
    """Whether a node of a part uses a compressed weight, or was replaced by one that does."""
    node = next((node for node in model.graph if node.name == name), None)
    if node is None:
        return True
    return any(_is_dequantize(value.producer()) for value in node.inputs if value is not None)


def _put_onnx_first(model: onnx.ModelProto) -> None:
    """Move ONNX's own opset import to the front."""
    imports = sorted(model.opset_import, key=lambda entry: entry.domain != "")
    copies = [onnx.helper.make_opsetid(entry.domain, entry.version) for entry in imports]
    del model.opset_import[:]
    model.opset_import.extend(copies)
