"""Models and example inputs of this process's exports, for `verify`; held by weak references."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from htp_export.errors import InputError

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a model."""


@dataclass(frozen=True)
class _Export:
    """An export of a model, which keeps neither the model nor its inputs alive."""

    model: Callable[[], torch.nn.Module | None]
    # its example inputs, positional and by keyword, each replaced by a function that returns it
    inputs: Any
    # the returned program, whose ``ExportedProgram`` keeps the example inputs alive
    program: Callable[[], torch.onnx.ONNXProgram | None]

    def call(self, name: str) -> Call:
        """The example inputs; an `InputError` with ``name`` if they were garbage-collected."""
        try:
            args, kwargs = _resolved(self.inputs)
        except ReferenceError:
            example_inputs = self._inputs_of_program()
            if example_inputs is None:
                raise InputError(
                    f"{name}: the example inputs of its export are gone, because they are not kept alive; give args, "
                    "or keep what export returned"
                ) from None
            args, kwargs = example_inputs
        return tuple(args), dict(kwargs)

    def _inputs_of_program(self) -> Any:
        program = self.program()
        if program is None:
            return None
        return getattr(program.exported_program, "example_inputs", None)


_programs: weakref.WeakKeyDictionary[Any, _Export] = weakref.WeakKeyDictionary()
"""Program that an export returned → the export."""
_files: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, _Export]] = weakref.WeakKeyDictionary()
"""Model → file that was exported from it → the export."""


def remember(
    model: Any,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    f: Any,
    program: Any,
) -> None:
    """Cache an export that has ended, as long as the model and the returned program are alive."""
    if not isinstance(model, torch.nn.Module):
        return
    positional = tuple(args) if isinstance(args, tuple | list) else (args,)
    inputs = _weak((positional, dict(kwargs or {})))
    export = _Export(
        weakref.ref(model), inputs, (lambda: None) if program is None else weakref.ref(program)
    )
    if program is not None:
        _programs[program] = export
    if isinstance(f, str | os.PathLike):
        _files.setdefault(model, {})[_path_of(f)] = export


def model_and_call(program: Any) -> tuple[torch.nn.Module, Call]:
    """The model and the example inputs of a program that `export` returned.

    Raises an `InputError` if they are gone, or unknown.
    """
    export = _programs.get(program)
    if export is None:
        raise InputError(
            "cannot find the nn.Module that this program was exported from: htp_export.export "
            "remembers it for an nn.Module; give verify(model, program, args)"
        )
    model = export.model()
    if model is None:
        raise InputError(
            "the model that this program was exported from is gone, because it is not kept alive; keep it, or give "
            "verify(model, program, args)"
        )
    return model, export.call("this program")


def call_of(model: torch.nn.Module, onnx: Any) -> Call | None:
    """The example inputs with which this process exported a model to a file or program, or None."""
    export = None
    name = "this program"
    if isinstance(onnx, str | os.PathLike):
        export = _files.get(model, {}).get(_path_of(onnx))
        name = os.fspath(onnx)
    elif isinstance(onnx, torch.onnx.ONNXProgram):
        export = _programs.get(onnx)
    if export is None or export.model() is not model:
        return None
    return export.call(name)


def _path_of(file: str | os.PathLike[str]) -> str:
    return os.fspath(Path(file).resolve())


def _weak(value: Any) -> Any:
    """Arguments, each leaf (no Python container) replaced by a function that returns it."""
    if type(value) in (tuple, list):
        return type(value)(map(_weak, value))
    if type(value) is dict:
        return {name: _weak(item) for name, item in value.items()}
    try:
        return weakref.ref(value)
    except TypeError:  # a number, a text, None
        return lambda: value


def _resolved(weak: Any) -> Any:
    """The arguments that `_weak` replaced; a `ReferenceError` if one was garbage-collected."""
    if isinstance(weak, tuple | list):
        return type(weak)(map(_resolved, weak))
    if isinstance(weak, dict):
        return {name: _resolved(item) for name, item in weak.items()}
    value = weak()
    if value is None and isinstance(weak, weakref.ref):
        raise ReferenceError
    return value
