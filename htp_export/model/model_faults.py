"""Errors that a fault of the model causes are raised as such.

If work on a model raised an error, onnx's shape inference and its checker examine the model. If one
of them rejects it, the raised error has their message, with the node at fault. Otherwise, the error
is a fault of htp_export and does not change. ONNX Runtime is not asked: it also rejects valid
models, if it has no kernel for an operator.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import onnx
import onnx_ir as ir

from htp_export.errors import HtpExportError, InputError, described
from htp_export.files.written_check import faults_of, made_from
from htp_export.model.tagged import TaggedModel, model_of, name_of
from htp_export.process.argument_types import checks_arguments

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LONGEST = 500  # characters of another library's message: a screen, not a whole graph


def names_model_faults(*parameters: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function to raise an InputError if it fails because a model is not valid.

    Arguments of wrong types are a TypeError, see `checks_arguments`.

    Args:
        parameters: The parameters of the function that are models, in any form that ``load``
            accepts.

    Examples:
        >>> @names_model_faults("model")
        ... def axes(model):
        ...     return ["xyz"[axis] for axis in model.graph[0].attributes.get_ints("perm")]
        >>> x = ir.val("x", ir.DataType.FLOAT, [2, 3])
        >>> turned = ir.node("Transpose", [x], attributes={"perm": [7, 0]}, name="turn")
        >>> outputs, opsets = turned.outputs, {"": 20}
        >>> graph = ir.Graph([x], outputs, nodes=[turned], opset_imports=opsets, name="g")
        >>> try:
        ...     axes(ir.Model(graph, ir_version=10))
        ... except InputError as error:
        ...     print("not a valid ONNX model" in str(error), "Transpose 'turn'" in str(error))
        True True
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @checks_arguments
        @functools.wraps(function)
        def named(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            def models() -> list[Any]:
                try:
                    arguments = signature.bind(*args, **kwargs).arguments
                except TypeError:  # Python's own error names the function
                    return []
                return [arguments[name] for name in parameters if name in arguments]

            try:
                with made_from(lambda: _opened(models())):
                    return function(*args, **kwargs)
            except (HtpExportError, ImportError, MemoryError, OSError):
                raise
            except Exception as error:  # an invalid model may raise any error
                for source in models():
                    if fault := _fault(source):
                        name = name_of(getattr(source, "_file", None) or source, "the model")
                        raise InputError(
                            f"{name}: not a valid ONNX model: {fault} ({described(error)})"
                        ) from error
                raise

        return named

    return decorated


def _opened(sources: Iterable[Any]) -> Iterator[ir.Model]:
    for source in sources:
        with contextlib.suppress(HtpExportError, TypeError):
            yield model_of(source)


def _fault(source: Any) -> str:
    if not isinstance(
        source, TaggedModel | ir.Model | onnx.ModelProto | str | os.PathLike
    ) and not hasattr(source, "model"):
        return ""
    try:
        return next(map(str, faults_of(model_of(source))), "")
    except HtpExportError:
        return ""
    except Exception as error:
        return f"it cannot be copied: {described(error)[:_LONGEST]}"
