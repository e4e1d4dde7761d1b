"""What an export was made of, for `verify`: the model and its example inputs, held weakly."""

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
    """An export of a model; nothing that it was made of is kept alive."""

    model: Callable[[], torch.nn.Module | None]
    # its example inputs, positional and by keyword, each replaced by a function that returns it
    inputs: Any
    # What the export returned, whose ``ExportedProgram`` keeps the example inputs alive
    program: Callable[[], torch.onnx.ONNXProgram | None]

    def call(self, name: str) -> Call:
        """The call, of the inputs as they are now; an `InputError` if they are gone."""
        try:
            args, kwargs = _alive(self.inputs)
        except ReferenceError:
            program = self.program()
            known = (
                None
                if program is None
                else getattr(program.exported_program, "example_inputs", None)
            )
            if known is None:
                raise InputError(
                    f"{name}: the example inputs of its export are gone, because they are not kept alive; give args, "
                    "or keep what export returned"
                ) from None
            args, kwargs = known
        return tuple(args), dict(kwargs)


_programs: weakref.WeakKeyDictionary[Any, _Export] = weakref.WeakKeyDictionary()
_files: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, _Export]] = weakref.WeakKeyDictionary()
"""Model → file that was exported from it → the export."""


def remember(model: Any, args: Any, kwargs: Mapping[str, Any] | None, f: Any, program: Any) -> None:
    """Remember an export that has ended, as long as the model and what it returned are alive."""
    if not isinstance(model, torch.nn.Module):
        return
    given = args if isinstance(args, tuple | list) else (args,)
    inputs = _weak((tuple(given), dict(kwargs or {})))
    made = _Export(
        weakref.ref(model), inputs, (lambda: None) if program is None else weakref.ref(program)
    )
    if program is not None:
        _programs[program] = made
    if isinstance(f, str | os.PathLike):
        _files.setdefault(model, {})[_path_of(f)] = made


def model_and_call(program: Any) -> tuple[torch.nn.Module, Call]:
    """The model and the example inputs of what `export` returned; an `InputError` if they are gone, or not known."""
    made = _programs.get(program)
    if made is None:
        raise InputError(
            "it is not known of which model this program was made: htp_export.export remembers it for an nn.Module; "
            "give verify(model, program, args)"
        )
    model = made.model()
    if model is None:
        raise InputError(
            "the model that this program was exported from is gone, because it is not kept alive; keep it, or give "
            "verify(model, program, args)"
        )
    return model, made.call("this program")


def call_of(model: torch.nn.Module, onnx: Any) -> Call | None:
    """The example inputs with which this process exported a file or program from a model; None if it did not."""
    if isinstance(onnx, str | os.PathLike):
        made = _files.get(model, {}).get(_path_of(onnx))
    else:
        made = _programs.get(onnx) if isinstance(onnx, torch.onnx.ONNXProgram) else None
    if made is None or made.model() is not model:
        return None
    return made.call(os.fspath(onnx) if isinstance(onnx, str | os.PathLike) else "this program")


def _path_of(file: str | os.PathLike[str]) -> str:
    return os.fspath(Path(file).resolve())


def _weak(value: Any) -> Any:
    """Arguments, with a function that returns it in place of each that is no container of Python."""
    if type(value) in (tuple, list):
        return type(value)(map(_weak, value))
    if type(value) is dict:
        return {name: _weak(each) for name, each in value.items()}
    try:
        return weakref.ref(value)
    except TypeError:  # a number, a text, None
        return lambda: value


def _alive(value: Any) -> Any:
    """The arguments again; a `ReferenceError` if one is gone."""
    if isinstance(value, tuple | list):
        return type(value)(map(_alive, value))
    if isinstance(value, dict):
        return {name: _alive(each) for name, each in value.items()}
    found = value()
    if found is None and isinstance(value, weakref.ref):
        raise ReferenceError
    return found
