"""``--as-python``: the Python of a command, which is printed in place of a run.

The command runs up to its first call of a public function, and this call is printed with its
arguments: command and function cannot differ. Defaults are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from htp_export.discovery import imported_for_types, names_in
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export.process.argument_types import is_torch_module, observed_calls

_PACKAGE_FILE = Path(__file__).parents[1] / "__init__.py"
_LORA = "htp_export.capabilities.lora."
_TOOLS = "htp_export.capabilities.carry.adapters."
_OBJECTS = {
    "session_options": "an onnxruntime.SessionOptions, which the command makes of --threads and --level"
}
"""Parameters whose values the command line makes of several options, and what they are."""
_CALLED_BEFORE = ("load", "load_partition")
"""Functions that a command calls to read or check a file; it is about the next one."""


class _CallSeen(BaseException):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def python_of(run: Callable[[], object]) -> str:
    """Run a command up to its call of a public function, and return this call as Python.

    Raises:
        InputError: If the command calls no public function, or only on a PyTorch model.
    """

    def observe(
        function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        name = public_name(function)
        if name is not None and name not in _CALLED_BEFORE:
            raise _CallSeen(_program(name, function, args, kwargs))

    try:
        with observed_calls(observe):
            run()
    except _CallSeen as seen:
        return seen.text
    raise InputError("--as-python: this command is not one call of a function; see docs/api")


def public_name(function: Callable[..., Any]) -> str | None:
    """Return the name of a function in ``htp_export``; None for a function that is not public.

    Examples:
        >>> from htp_export.capabilities.extract.extraction import extract
        >>> from htp_export.capabilities.lora.lora_inputs import insert
        >>> public_name(extract), public_name(insert), public_name(public_name)
        ('extract', 'lora.insert', None)
    """
    name, module = function.__name__, function.__module__
    if imported_for_types(str(_PACKAGE_FILE)).get(name) == module:
        return name
    if module.startswith(_LORA) and name in names_in(f"{_LORA}commands", "_command"):
        return f"lora.{name}"
    if module.startswith(_TOOLS):
        return f"tools.{name}"
    return None


def _program(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """The lines of a program that makes the call, and prints its result."""
    remarks: list[str] = []
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    texts: list[str] = []
    is_positional = True
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            options = bound.arguments.get(parameter.name, {})
            texts += [f"{key}={_text(value)}" for key, value in options.items()]
            continue
        value = bound.arguments.get(parameter.name, parameter.default)
        if parameter.name not in bound.arguments or _is_default(value, parameter):
            is_positional = False
            continue
        if parameter.name in _OBJECTS:
            remarks.append(f"# {parameter.name}: {_OBJECTS[parameter.name]}")
            is_positional = False
            continue
        is_positional = is_positional and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        texts.append(_text(value) if is_positional else f"{parameter.name}={_text(value)}")
    call = f"htp_export.{name}({', '.join(texts)})"
    return "\n".join(["import htp_export", "", *remarks, f"result = {call}", "print(result)", ""])


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a value is the default; the command line has empty mappings and lists in place of None."""
    if parameter.default is None and isinstance(value, Mapping | list | tuple) and not value:
        return True
    return type(value) is type(parameter.default) and value == parameter.default


def _text(value: Any) -> str:
    """A value as Python.

    Raises:
        InputError: If the value is an object that the command line made, such as a PyTorch model.
    """
    if isinstance(value, PathLike):
        return repr(fspath(value))
    if isinstance(value, Mapping):
        entries = [f"{_text(key)}: {_text(each)}" for key, each in value.items()]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, TaggedModel):
        return repr(fspath(getattr(value, "_file", None) or "model.onnx"))
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if is_torch_module(value):
        raise InputError("--as-python is for commands on files; for a model, see docs/export.md")
    raise InputError(f"--as-python: {type(value).__name__} has no short form in Python")
