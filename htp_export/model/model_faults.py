"""Errors of the work on a model, told as faults of the model where it is at fault.

`structure` refuses what no work could do without. A model may be wrong in more ways than these: a permutation with an
axis that the tensor does not have, sizes that do not fit. Work on it ends in whatever error Python has for that. Then,
and only then, onnx's shape inference and its checker look at the model. If one of them refuses it, the error says so,
with the node that it names. If none does, the error is a fault of htp_export, and stays what it is. ONNX Runtime is not
asked: it also refuses valid models, as of operators that it does not have. Errors of the system (a full disk, a missing
package, no memory) stem from no model.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import onnx
import onnx_ir as ir

from htp_export.errors import HtpExportError, InputError, described
from htp_export.files.slots import slots
from htp_export.model.tagged import TaggedModel, model_of, name_of

__all__ = ["names_model_faults"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_SMALL_BYTES = 1024  # what is larger holds weights, and no sizes that shapes could depend on
_LONGEST = 500  # characters of another library's message


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
            except (HtpExportError, ImportError, MemoryError, OSError):
                raise
            except Exception as error:  # whatever the work came across
                arguments = signature.bind(*args, **kwargs).arguments
                for source in (arguments[name] for name in parameters if name in arguments):
                    if fault := _fault(source):
                        name = name_of(source, "the model")
                        raise InputError(f"{name}: not a valid ONNX model: {fault} ({described(error)})") from error
                raise

        return named

    return decorated


def _fault(source: Any) -> str:
    """What is wrong with a model according to onnx; empty if it is valid."""
    if not isinstance(source, TaggedModel | ir.Model | onnx.ModelProto | str | os.PathLike) and not hasattr(
        source, "model"
    ):
        return ""
    try:
        proto = ir.to_proto(_without_weights(model_of(source)))
    except HtpExportError:
        return ""
    except Exception as error:
        return f"it cannot be copied: {described(error)[:_LONGEST]}"
    for check in (_infer_strictly, onnx.checker.check_model):  # the first one names nodes
        try:
            check(proto)
        except Exception as error:  # onnx's errors share no base but this
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return " ".join(lines)[:_LONGEST] or type(error).__name__
    return ""


def _without_weights(model: ir.Model) -> ir.Model:
    """A copy of a model whose weights, which are not read, are inputs; small tensors, which may be sizes, stay.

    No tensor stays in a data file: onnx looks for data files in the current folder.
    """
    copy = model.clone()
    main = copy.graph
    for graph in list(copy.graphs()):
        for name, value in list(graph.initializers.items()):
            tensor = value.const_value
            if tensor is not None and tensor.nbytes <= _SMALL_BYTES:
                continue
            if tensor is not None:
                value.shape, value.dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype
            del graph.initializers[name]
            value.const_value = None
            if graph is main and not value.is_graph_input():
                main.inputs.append(value)
            elif graph is not main and all(each.name != name for each in main.inputs):
                main.inputs.append(ir.Value(name=name, shape=value.shape, type=value.type))
    for slot in list(slots(copy)):
        if slot.external:
            slot.put(ir.Tensor(slot.tensor.numpy(), dtype=slot.tensor.dtype, name=slot.tensor.name))
    return copy


def _infer_strictly(proto: onnx.ModelProto) -> None:
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
