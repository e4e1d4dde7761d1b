"""NNCF as the engine of a precision: its post-training quantization of the nodes of the chosen modules alone."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import htp_export.errors
from htp_export.capabilities.quantize.integers import is_divisible, static_bytes
from htp_export.capabilities.quantize.precisions import Precision
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.errors import HtpExportError, ToolError, described
from htp_export.files.parsing import model_from_proto
from htp_export.process.quiet import quiet
from htp_export.runtime.arrays import Array
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import SessionSettings
from htp_export.shapes.operator_kinds import subgraphs
from htp_export.weights.products import weight_place

__all__ = ["calling_nncf", "check_result", "nncf_bytes", "put_first", "quantize_with_nncf", "takes_nncf"]

_OWN = Path(htp_export.errors.__file__).parent

_WEIGHTED = frozenset(("Conv", "ConvTranspose", "MatMul", "Gemm", "Gather"))


def takes_nncf(node: ir.Node, types: Mapping[str, ir.DataType | None]) -> bool:
    """Whether NNCF quantizes what the operator reads: activations and weights, or the rows of a table.

    Raises:
        InputError: If NNCF is not installed.
    """
    from htp_export.capabilities.carry.adapting import library

    library("nncf", "nncf")
    groups = library("nncf.onnx.graph.metatypes.groups", "nncf")
    known = {name for operator in groups.INPUTS_QUANTIZABLE_OPERATIONS for name in operator.get_all_aliases()}
    is_table = node.op_type == "Gather" and constant_of(node.inputs[0]) is not None
    if node.domain or subgraphs(node) or not (node.op_type in known or is_table):
        return False
    read = [value for value in (*node.inputs[:1], *node.outputs[:1]) if value is not None]
    return bool(read) and all(types.get(str(value.name)) == ir.DataType.FLOAT for value in read)


def nncf_bytes(node: ir.Node, place: int, tensor: ir.TensorProtocol, precision: Precision) -> int | None:
    """The bytes of a weight that NNCF quantized, with the scales of channels; None for what it leaves, as biases."""
    if node.op_type not in _WEIGHTED or place != weight_place(node):
        return None
    if node.op_type != "Gather":
        return static_bytes(node, place, tensor, precision)
    shape = [int(size) for size in tensor.shape.numpy()]
    return math.prod(shape) + (5 * shape[0] if precision.per_channel else 0)


def quantize_with_nncf(
    part: Submodel,
    precision: Precision,
    runs: Sequence[Mapping[str, Array]],
    metric: Callable[[onnx.ModelProto], float] | None = None,
) -> tuple[ir.Model, list[str]]:
    """Quantize a part with ``nncf.quantize``; the result is checked, loaded and run before it is returned.

    NNCF sees the part alone, so that it cannot change other nodes, or merge scales with theirs.

    Args:
        part: Nodes that `takes_nncf`; it is used up.
        precision: A precision whose engine is ``nncf``.
        runs: The values of the inputs of the part, for each run.
        metric: For a precision with ``max_drop``, the number that the whole model gets with what NNCF made of the part:
            ``nncf.quantize_with_accuracy_control`` puts operators back until it is large enough.

    Returns:
        What NNCF made; and the names of the nodes that it left as they are.

    Raises:
        ToolError: If NNCF fails, or if onnx or ONNX Runtime refuses its result.
    """
    from htp_export.capabilities.carry.adapting import library

    nncf = library("nncf", "nncf")
    given = part.proto()
    put_first(given, "")  # NNCF takes the first one for the opset of ONNX
    expected, wide = _measured(part, given, runs)
    ignored = [str(node.name) for node in part.model.graph if wide.intersection(_names(node.inputs, node.outputs))]
    data, scope = nncf.Dataset(list(runs)), nncf.IgnoredScope(names=ignored, validate=False)
    arguments = {"subset_size": len(runs), "ignored_scope": scope, **_arguments(nncf, precision)}
    parameters = _parameters(precision)
    with calling_nncf(precision):
        made: onnx.ModelProto
        if metric is None:
            made = nncf.quantize(given, data, advanced_parameters=parameters, **arguments)
        else:
            made = _controlled(nncf, given, data, parameters, arguments, precision, metric)
    model = check_result(made, expected, runs[0])
    return model, _left(part, model, ignored)


def _controlled(
    nncf: Any,
    given: onnx.ModelProto,
    data: Any,
    parameters: Any,
    arguments: Mapping[str, Any],
    precision: Precision,
    metric: Callable[[onnx.ModelProto], float],
) -> onnx.ModelProto:
    """Quantize with accuracy control.

    For ONNX, NNCF ranks operators by the metric alone, on some samples of the validation data. It is given one sample,
    which stands for all: a metric need not be one of single samples.
    """
    from htp_export.capabilities.carry.adapting import library

    advanced = library("nncf.quantization.advanced_parameters", "nncf")

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
        advanced_accuracy_restorer_parameters=advanced.AdvancedAccuracyRestorerParameters(num_ranking_workers=1),
        **arguments,
    )
    return made


@contextlib.contextmanager
def calling_nncf(precision: Precision) -> Iterator[None]:
    """Call NNCF, without what it prints and logs; what it raises is a `ToolError`, but for faults of htp_export."""
    try:
        with quiet("", "nncf"):
            yield
    except HtpExportError:
        raise
    except Exception as error:
        if not _is_of_nncf(error):
            raise
        raise ToolError("nncf", f"failed on the modules of {precision.name!r}: {described(error)}") from error


def _is_of_nncf(error: Exception) -> bool:
    """Whether NNCF raised an error, or what it called; not if it called htp_export back, as for a metric."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if "nncf" in file.parts or file.is_relative_to(_OWN):
            return "nncf" in file.parts
    return False


def check_result(made: onnx.ModelProto, expected: Mapping[str, Array], feed: Mapping[str, Array]) -> ir.Model:
    """Check what NNCF made: onnx accepts it, ONNX Runtime runs it, and its outputs have shape, type and finite values.

    Args:
        made: The result.
        expected: The outputs before.
        feed: The inputs that gave them.

    Returns:
        The result.

    Raises:
        ToolError: If it is wrong.
    """
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
            raise ToolError("nncf", f"made a model whose output {name!r} is missing, or has another shape or type")
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
        str(value.name): value.const_value.numpy() for value in model.graph.initializers.values() if value.const_value
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
        from_integers = any(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers)
        if node.name not in ignored and (from_integers or quantized.intersection(makers)):
            quantized.add(node)
        else:
            left.append(str(node.name))
    return left


def _names(*values: Sequence[ir.Value | None]) -> list[str]:
    return [str(value.name) for listed in values for value in listed if value is not None]


def _arguments(nncf: Any, precision: Precision) -> dict[str, Any]:
    """The fields of a precision as arguments of ``nncf.quantize``.

    SmoothQuant is for transformers: it runs only if the model is said to be one.
    """
    presets = nncf.QuantizationPreset
    return {
        "preset": presets.PERFORMANCE if precision.symmetric else presets.MIXED,
        "model_type": nncf.ModelType.TRANSFORMER if precision.smooth_quant else None,
    }


def _parameters(precision: Precision) -> Any:
    """The fields of a precision as NNCF's advanced parameters.

    Ranges are those of all values, as ``minmax`` says; NNCF's own default takes the mean of the runs' ranges.
    """
    from htp_export.capabilities.carry.adapting import library

    advanced = library("nncf.quantization.advanced_parameters", "nncf")
    ranges = library("nncf.quantization.range_estimator", "nncf")
    return advanced.AdvancedQuantizationParameters(
        overflow_fix=advanced.OverflowFix.ENABLE if precision.reduce_range else advanced.OverflowFix.DISABLE,
        disable_bias_correction=not precision.bias_correction,
        weights_quantization_params=advanced.QuantizationParameters(per_channel=precision.per_channel),
        activations_range_estimator_params=ranges.RangeEstimatorParametersSet.MINMAX,
    )


def put_first(model: onnx.ModelProto, domain: str) -> None:
    """Put the opset import of a domain first."""
    imports = sorted(model.opset_import, key=lambda entry: entry.domain != domain)
    copies = [onnx.helper.make_opsetid(entry.domain, entry.version) for entry in imports]
    del model.opset_import[:]
    model.opset_import.extend(copies)
