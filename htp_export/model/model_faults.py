"""Errors of the work on a model, told as faults of the model where it is at fault.

Only after work on a model ended in an error do onnx's shape inference and its checker look at the
model. If one of them refuses it, the error says so, with the node that it names. If none does, the
error is a fault of htp_export, and stays what it is. ONNX Runtime is not asked: it also refuses
valid models, as of operators that it does not have.
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

_LONGEST = 500  # characters of another library's message


def names_model_faults(*parameters: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function raise an InputError that says what is wrong with a model, where its work fails because of that.

    Arguments of wrong types are a TypeError, see `checks_arguments`.

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
                    given = signature.bind(*args, **kwargs).arguments
                except TypeError:  # Python's own error names the function
                    return []
                return [given[name] for name in parameters if name in given]

            try:
                with made_from(lambda: _opened(models())):
                    return function(*args, **kwargs)
            except (HtpExportError, ImportError, MemoryError, OSError):
                raise
            except Exception as error:  # whatever the work came across
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
