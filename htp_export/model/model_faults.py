"""Errors of the work on a model, told as faults of the model where it is at fault.

`structure` refuses what no work could do without. A model may be wrong in more ways than these: a permutation with an
axis that the tensor does not have, sizes that do not fit. Work on it ends in whatever error Python has for that. Then,
and only then, the model is given to those that know all rules: the shape inference and the checker of onnx, and ONNX
Runtime. If one of them refuses it, the error says so, with the node that it names. If none does, the error is a fault
of htp_export, and stays what it is.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import onnx
import onnx_ir as ir

from htp_export.errors import HtpExportError, InputError
from htp_export.model.tagged import TaggedModel, model_of, name_of

__all__ = ["names_model_faults"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_SMALL_BYTES = 1024  # what is larger holds weights, and no sizes that shapes could depend on


def names_model_faults(*parameters: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function raise an InputError that says what is wrong with a model, where its work fails because of that.

    Args:
        parameters: Those parameters of the function that are models: whatever ``load`` takes.

    Examples:
        >>> @names_model_faults("model")
        ... def axes(model):
        ...     return ["xyz"[axis] for axis in model.graph[0].attributes.get_ints("perm")]
        >>> x = ir.val("x", ir.DataType.FLOAT, [2, 3])
        >>> turned = ir.node("Transpose", [x], attributes={"perm": [7, 0]}, name="turn")
        >>> graph = ir.Graph([x], turned.outputs, nodes=[turned], opset_imports={"": 20}, name="g")
        >>> try:
        ...     axes(ir.Model(graph, ir_version=10))
        ... except InputError as error:
        ...     print("not a valid ONNX model" in str(error), "node name: turn" in str(error))
        True True
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def named(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except HtpExportError:
                raise
            except Exception as error:  # whatever the work came across
                given = signature.bind(*args, **kwargs).arguments
                for source in (given[name] for name in parameters if name in given):
                    fault = _fault(source)
                    if fault:
                        name = name_of(source, "the model")
                        said = f"{type(error).__name__}: {error}".split("\n", 1)[0].rstrip(": ")
                        raise InputError(f"{name}: not a valid ONNX model: {fault} ({said})") from error
                raise

        return named

    return decorated


def _fault(source: Any) -> str:
    """What is wrong with a model, as the first judge says it; empty where none finds anything."""
    if not isinstance(source, TaggedModel | ir.Model | onnx.ModelProto | str | os.PathLike) and not hasattr(
        source, "model"
    ):
        return ""
    try:
        proto = ir.to_proto(_without_weights(model_of(source)))
    except HtpExportError:
        return ""
    except Exception as error:
        return f"it cannot be copied: {_deepest(error)}"
    return next(filter(None, _judged(proto)), "")


def _without_weights(model: ir.Model) -> ir.Model:
    """A copy of a model whose weights are inputs; constants from which sizes may be computed stay.

    Args:
        model: The model; it is not changed, and its weights are not read.
    """
    copy = model.clone()
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes > _SMALL_BYTES:
            if tensor is not None:
                value.shape, value.dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype
            del copy.graph.initializers[name]
            value.const_value = None
            if not value.is_graph_input():
                copy.graph.inputs.append(value)
    return copy


def _deepest(error: BaseException) -> str:
    """What was wrong in the end: onnx_ir says first, level by level, what it was doing."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:500]


def _judged(proto: onnx.ModelProto) -> Iterator[str]:
    """What each judge says of a model; the first names nodes."""
    for judge in (_inferred, _checked, _loaded):
        try:
            judge(proto)
        except Exception as error:  # ONNX Runtime's errors share no base but this
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            yield " ".join(lines)[:500] or type(error).__name__
        else:
            yield ""


def _checked(proto: onnx.ModelProto) -> None:
    onnx.checker.check_model(proto)


def _inferred(proto: onnx.ModelProto) -> None:
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)


def _loaded(proto: onnx.ModelProto) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
