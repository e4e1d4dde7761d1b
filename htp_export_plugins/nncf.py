"""NNCF as an engine of `quantize`: ``nncf.quantize`` and ``nncf.compress_weights`` for the nodes of the chosen modules.

``METHODS`` is what ``htp_export.capabilities.quantize.method`` asks for. NNCF sees the nodes alone,
so that it cannot change others, or merge scales with theirs. What it makes is checked, loaded and
run before it is believed.
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
from htp_export.capabilities.carry.adapting import library
from htp_export.capabilities.quantize.calibrating import is_divisible
from htp_export.capabilities.quantize.method import Made, Method, Precision
from htp_export.capabilities.quantize.methods.static import Static, channel_axis
from htp_export.capabilities.quantize.methods.weights import Blocks, sizes_in_blocks
from htp_export.capabilities.quantize.weight_operators import write_products
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.errors import HtpExportError, ToolError, described
from htp_export.files.parsing import model_from_proto
from htp_export.process.quiet import quiet
from htp_export.runtime.arrays import Array
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import SessionSettings
from htp_export.shapes.operator_kinds import subgraphs
from htp_export.weights.products import weight_axes, weight_place

__all__ = ["METHODS"]

_WEIGHTED = frozenset(("Conv", "ConvTranspose", "MatMul", "Gemm", "Gather"))
_OWN = Path(htp_export.__file__).parent

_BLOCKS_FROM = 21  # the opset whose DequantizeLinear has blocks; before, NNCF writes MatMulNBits
_MICROSOFT = "com.microsoft"
_SCALED_NODES = 2  # an activation function and a Mul between two products

Metric = Callable[[onnx.ModelProto], float]
"""The number that the whole model gets with what NNCF made of a part."""


class Activations(Static):
    """``nncf.quantize``; with ``max_drop``, ``nncf.quantize_with_accuracy_control``."""

    activations = ("int8",)
    weights = ("int8",)
    calibrations = ("minmax",)
    options = ("smooth_quant", "bias_correction", "max_drop")

    def check(self) -> None:
        _check_switches(self.precision, ("smooth_quant", "bias_correction"))
        drop = self.precision.options.get("max_drop")
        if drop is not None and (
            isinstance(drop, bool) or not isinstance(drop, int | float) or not drop >= 0
        ):
            raise self.precision.fault(f"max_drop is {drop!r}, not a number from 0 up")

    readings = 2  # all runs of the inputs of a part are in memory

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether NNCF quantizes what the operator reads: activations and weights, or the rows of a table."""
        groups = _nncf("onnx.graph.metatypes.groups")
        known = {
            name
            for operator in groups.INPUTS_QUANTIZABLE_OPERATIONS
            for name in operator.get_all_aliases()
        }
        is_table = node.op_type == "Gather" and constant_of(node.inputs[0]) is not None
        if node.domain or subgraphs(node) or not (node.op_type in known or is_table):
            return False
        return facts.has_floats(node)

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        if node.op_type not in _WEIGHTED or place != weight_place(node):
            return None  # biases stay
        if node.op_type != "Gather":
            return super().bytes_of(node, place, tensor, facts)
        shape = [int(size) for size in tensor.shape.numpy()]
        return math.prod(shape) + (5 * shape[0] if self.precision.per_channel else 0)

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        return None  # NNCF's own affair

    def channels(self, node: ir.Node, place: int = 1) -> int:
        return self.scales_along(channel_axis(node), constant_of(node.inputs[place]))

    def quantize(self, part: Submodel, work: Work) -> Made:
        precision, metric, control = self.precision, None, work.validation
        with work.runs(part) as read:
            runs = list(read)
        if control is not None and precision.max_drop is not None:
            budget = control.budget(work.model, precision.max_drop, precision.name)
            precision = dataclasses.replace(
                precision, options={**precision.options, "max_drop": budget}
            )

            def metric(made: onnx.ModelProto) -> float:
                return control.with_part(work.model, part, made)

        nncf, given = _nncf(), part.proto()
        _put_onnx_first(given)  # NNCF takes the first one for the opset of ONNX
        expected, wide = _measured(part, given, runs)
        ignored = [
            str(node.name)
            for node in part.model.graph
            if wide.intersection(_names(node.inputs, node.outputs))
        ]
        arguments = {
            "preset": nncf.QuantizationPreset.PERFORMANCE
            if precision.symmetric
            else nncf.QuantizationPreset.MIXED,
            # SmoothQuant is for transformers: it runs only if the model is said to be one
            "model_type": nncf.ModelType.TRANSFORMER
            if precision.options.get("smooth_quant")
            else None,
            "subset_size": len(runs),
            "ignored_scope": nncf.IgnoredScope(names=ignored, validate=False),
        }
        data, parameters = nncf.Dataset(list(runs)), _parameters(precision)
        with _calling_nncf(precision):
            if metric is None:
                made = nncf.quantize(given, data, advanced_parameters=parameters, **arguments)
            else:
                made = _controlled(given, data, parameters, arguments, precision, metric)
        model = _checked(made, expected, runs[0])
        left = _left(part, model, ignored)
        causes = "NNCF leaves them, or values that they read or make fill masks and cannot be divided into the steps of"
        back = (
            "" if precision.max_drop is None else ", or the metric would fall by more than max_drop"
        )
        return Made(model, dict.fromkeys(left, f"{causes} {precision.name}{back}"))


class Weights(Method):
    """``nncf.compress_weights``, all weights in one precision."""

    activations = ("float32",)
    weights = ("int4", "int8")
    options = ("awq", "scale_estimation")
    order = 1
    first_opset = 13

    def check(self) -> None:
        _check_switches(self.precision, self.options)
        for name in self.precision.options:
            if self.precision.weight != "int4" and self.precision.options[name]:
                raise self.precision.fault(f"{name} is of int4")

    @property
    def calibrated(self) -> bool:
        return any(self.precision.options.values())

    readings = 2  # without data to fit to, one run is read for the check

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether NNCF compresses the constant weight of a node.

        In 4 bits, products whose blocks are all full: it refuses others, and what it writes for
        tables does not load. In 8 bits, convolutions and tables, too.
        """
        _nncf()
        bits, size = self.precision.bits, self.precision.block_size
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
        return node.op_type != "Gather" or (
            len(weight.shape) == 2 and node.attributes.get_int("axis", 0) == 0
        )

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        if place != weight_place(node):
            return None
        shape, symmetric = [int(size) for size in tensor.shape.numpy()], self.precision.symmetric
        elements = math.prod(shape)
        if self.precision.bits == 8:
            axes = weight_axes(node, 1)  # a table has a scale for each row
            return elements + shape[0 if axes is None else axes[1]] * (4 if symmetric else 5)
        along, across = sizes_in_blocks(node)
        blocks = along // self.precision.block_size
        columns = across * ((blocks + 1) // 2)
        points = (
            0
            if symmetric
            else columns
            if facts.opset < _BLOCKS_FROM
            else (blocks * across + 1) // 2
        )
        return (elements + 1) // 2 + 4 * blocks * across + points

    def groups(self, nodes: Sequence[ir.Node], work: Work) -> Iterable[Sequence[ir.Node]]:
        return [
            _scaled_before(nodes, work.planned, self.precision)
            if self.precision.options.get("awq")
            else nodes
        ]

    def quantize(self, part: Submodel, work: Work) -> Made:
        with work.runs(part) as read:
            runs = list(read if self.calibrated else islice(read, 1))
        weighted = [str(node.name) for node in part.model.graph if self.takes(node, work.facts)]
        if self.precision.bits == 4:
            # NNCF writes blocks of a Gemm's weight along the wrong axis
            write_products(part.model.graph)
        given = part.proto()
        _put_onnx_first(given)
        outputs = [str(value.name) for value in part.model.graph.outputs]
        with Runner(part.model, "the part for NNCF", SessionSettings()).opened(outputs) as run:
            expected = run(runs[0])
        with _calling_nncf(self.precision):
            made: onnx.ModelProto = _nncf().compress_weights(given, **self._arguments(runs))
        _repair(made)
        model = _checked(made, expected, runs[0])
        left = [name for name in weighted if not _is_compressed(model, name)]
        return Made(model, dict.fromkeys(left, "NNCF leaves them"))

    def _arguments(self, runs: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        nncf, precision = _nncf(), self.precision
        mode = getattr(
            nncf.CompressWeightsMode,
            f"INT{precision.bits}_{'SYM' if precision.symmetric else 'ASYM'}",
        )
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
    """NNCF, or a module of it; `InputError` if it is not installed."""
    return library(f"nncf.{module}" if module else "nncf", "nncf")


def _check_switches(precision: Precision, names: Iterable[str]) -> None:
    for name in names:
        precision.check(name, precision.options.get(name, False), (False, True))


def _controlled(
    given: onnx.ModelProto,
    data: Any,
    parameters: Any,
    arguments: Mapping[str, Any],
    precision: Precision,
    metric: Metric,
) -> onnx.ModelProto:
    """Quantize with accuracy control, by one sample of validation data: a metric need not be one of single samples."""
    nncf, advanced = _nncf(), _nncf("quantization.advanced_parameters")

    def validate(candidate: onnx.ModelProto, samples: Iterable[Any]) -> tuple[float, list[float]]:
        number = metric(candidate)
        return number, [number for _ in samples]

    made: onnx.ModelProto = nncf.quantize_with_accuracy_control(
        given,
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
    """A precision as NNCF's advanced parameters; ranges are those of all values, and not means of the runs' ranges."""
    advanced = _nncf("quantization.advanced_parameters")
    return advanced.AdvancedQuantizationParameters(
        overflow_fix=advanced.OverflowFix.ENABLE
        if precision.reduce_range
        else advanced.OverflowFix.DISABLE,
        disable_bias_correction=not precision.options.get("bias_correction", False),
        weights_quantization_params=advanced.QuantizationParameters(
            per_channel=precision.per_channel
        ),
        activations_range_estimator_params=_nncf(
            "quantization.range_estimator"
        ).RangeEstimatorParametersSet.MINMAX,
    )


@contextlib.contextmanager
def _calling_nncf(precision: Precision) -> Iterator[None]:
    """Call NNCF, without what it prints and logs; what it raises is a `ToolError`, but for faults of htp_export."""
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
    """Whether NNCF raised an error, or what it called; not if it called htp_export back, as for a metric."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if "nncf" in file.parts or file.is_relative_to(_OWN):
            return "nncf" in file.parts
    return True


def _checked(
    made: onnx.ModelProto, expected: Mapping[str, Array], feed: Mapping[str, Array]
) -> ir.Model:
    """What NNCF made, if it runs on a feed and its outputs are like those before; a `ToolError` otherwise."""
    try:
        onnx.checker.check_model(made)
        model = model_from_proto(made)
        with Runner(model, "the result", SessionSettings()).opened(list(expected)) as run:
            found = run(feed)
    except Exception as error:
        raise ToolError("nncf", f"made an invalid model: {described(error)}") from error
    for name, before in expected.items():
        after = found.get(name)
        if after is None or after.shape != before.shape or after.dtype != before.dtype:
            raise ToolError(
                "nncf",
                f"made a model whose output {name!r} is missing, or has another shape or type",
            )
        if np.isfinite(before).all() and not np.isfinite(after).all():
            raise ToolError("nncf", f"made a model whose output {name!r} is not finite")
    return model


def _measured(
    part: Submodel, given: onnx.ModelProto, runs: Sequence[Mapping[str, Array]]
) -> tuple[dict[str, Array], set[str]]:
    """The outputs of the first run, and the names of the tensors whose range cannot be divided into steps."""
    model = model_from_proto(given)
    outputs = [str(value.name) for value in model.graph.outputs]
    computed = _names(*(node.outputs for node in model.graph))
    weights = {
        str(value.name): value.const_value.numpy()
        for value in model.graph.initializers.values()
        if value.const_value
    }
    wide = {name for name, array in weights.items() if _is_wide(array)}
    expected: dict[str, Array] = {}
    with Runner(model, "the part for NNCF", SessionSettings(), use_up=True).opened(computed) as run:
        for feed in runs:
            found = run(feed)
            wide |= {name for name, array in [*feed.items(), *found.items()] if _is_wide(array)}
            expected = expected or {name: found[name] for name in outputs}
    return expected, wide


def _is_wide(array: Array) -> bool:
    floats = np.issubdtype(array.dtype, np.floating) and array.size
    return bool(floats) and not is_divisible((array.min(), array.max()))


def _left(part: Submodel, made: ir.Model, ignored: Collection[str]) -> list[str]:
    """The nodes of a part that neither read quantized tensors, nor follow a node that does, such as a bias."""
    names = {node.name for node in part.model.graph}
    quantized, left = set[ir.Node](), list[str]()
    for node in made.graph:
        if node.name not in names:
            continue
        makers = {value.producer() for value in node.inputs if value is not None}
        from_integers = any(
            maker is not None and maker.op_type == "DequantizeLinear" for maker in makers
        )
        if node.name not in ignored and (from_integers or quantized.intersection(makers)):
            quantized.add(node)
        else:
            left.append(str(node.name))
    return left


def _names(*values: Sequence[ir.Value | None]) -> list[str]:
    return [str(value.name) for listed in values for value in listed if value is not None]


def _scaled_before(
    nodes: Sequence[ir.Node], allowed: Mapping[ir.Node, object], precision: Precision
) -> list[ir.Node]:
    """The nodes in front of products that AWQ needs to see: it divides what they make by the scales of weights.

    Only those whose result nothing else reads, and that have the same precision in the plan
    (``allowed``).
    """
    found = dict.fromkeys(nodes)
    edge = [node.inputs[0] for node in nodes]
    for _ in range(_SCALED_NODES):
        makers = [value.producer() for value in edge if value is not None]
        new = [
            node
            for node in dict.fromkeys(maker for maker in makers if maker is not None)
            if node not in found
            and allowed.get(node) == precision
            and node.op_type not in _WEIGHTED  # NNCF would compress them, too
            and node.graph is nodes[0].graph
            and not subgraphs(node)
            and len(node.outputs) == 1
            and len(node.outputs[0].uses()) == 1
            and not node.outputs[0].is_graph_output()
        ]
        found.update(dict.fromkeys(new))
        edge = [value for node in new for value in node.inputs]
    order = {node: place for place, node in enumerate(nodes[0].graph or ())}
    return sorted(found, key=order.__getitem__)


def _repair(made: onnx.ModelProto) -> None:
    """Write what NNCF 3.4 leaves out.

    ``MatMulNBits`` needs an opset import, and zero points of which two are in a byte. The scales of
    channels of a convolution are a vector.
    """
    operators = [node for node in made.graph.node if node.domain == _MICROSOFT]
    if operators and all(entry.domain != _MICROSOFT for entry in made.opset_import):
        made.opset_import.append(onnx.helper.make_opsetid(_MICROSOFT, 1))
    tensors = {tensor.name: tensor for tensor in made.graph.initializer}
    for node in made.graph.node:
        read = [tensors.get(name) for name in node.input]
        sizes = {attribute.name: attribute.i for attribute in node.attribute}
        if node in operators and len(read) > 3 and read[3] is not None:
            _pack(read[3], sizes)
        elif node.op_type == "DequantizeLinear" and not sizes.get("block_size"):
            for tensor in read[1:]:
                if (
                    tensor is not None
                    and len(tensor.dims) > 1
                    and max(tensor.dims) == math.prod(tensor.dims)
                ):
                    tensor.dims[:] = [max(tensor.dims)]


def _pack(points: onnx.TensorProto, sizes: Mapping[str, int]) -> None:
    blocks = sizes["K"] // sizes["block_size"]
    if sizes["bits"] == 4 and list(points.dims) == [sizes["N"], blocks] and blocks > 1:
        array = np.pad(onnx.numpy_helper.to_array(points), ((0, 0), (0, blocks % 2)))
        points.CopyFrom(
            onnx.numpy_helper.from_array(array[:, ::2] | array[:, 1::2] << 4, points.name)
        )


def _is_compressed(model: ir.Model, name: str) -> bool:
    """Whether a node of a part reads a weight of few bits, or was replaced by one that does."""
    node = next((node for node in model.graph if node.name == name), None)
    makers = (
        [] if node is None else [value.producer() for value in node.inputs if value is not None]
    )
    return node is None or any(
        maker is not None and maker.op_type == "DequantizeLinear" for maker in makers
    )


def _put_onnx_first(model: onnx.ModelProto) -> None:
    imports = sorted(model.opset_import, key=lambda entry: entry.domain != "")
    copies = [onnx.helper.make_opsetid(entry.domain, entry.version) for entry in imports]
    del model.opset_import[:]
    model.opset_import.extend(copies)
