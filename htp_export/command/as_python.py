"""``--as-python``: the Python of a command, which is printed in place of a run.

The command runs up to its first call of a public function, and this call is printed with its
arguments: command and function cannot differ. Defaults are left out.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from htp_export.discovery import imported_for_types, names_in
from htp_export.errors import InputError
from htp_export.process.argument_types import is_torch_module, observed_calls

_PACKAGE_FILE = Path(__file__).parents[1] / "__init__.py"
_LORA = "htp_export.capabilities.lora."
_TOOLS = "htp_export.capabilities.carry.adapters."
_LONGEST_LINE = 100  # columns of a call, as in the code of this package
_CALLED_BEFORE = ("load", "load_partition")
"""Functions that a command calls to read or check a file; it is about the next one."""


class CallSeen(BaseException):
    """Ends a command whose Python is wanted: ``text`` is the program."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@dataclass(frozen=True)
class Written:
    """The text of a value in a program."""

    text: str


@dataclass
class Preparation:
    """The lines before a call, which create its objects.

    Attributes:
        imports: Module → names that are imported from it; none for ``import module``.
        lines: Statements.
        arguments: Parameter of the call → the text of its argument, in place of the command's.
        left_out: Parameters of the call that the program does not need.
        printed: The expression that is printed after the call.
    """

    imports: dict[str, list[str]] = field(default_factory=lambda: {"htp_export": []})
    lines: list[str] = field(default_factory=list)
    arguments: dict[str, Written] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    printed: str = "result"

    def program(self, *statements: str) -> str:
        """Return a program of the imports, the lines and these statements."""
        return "\n".join([*self._import_lines(), "", *self.lines, *statements, ""])

    def _import_lines(self) -> Iterator[str]:
        """The imports, in the order of `isort`: Python's own modules first."""
        own = [module for module in self.imports if module in sys.stdlib_module_names]
        others = [module for module in self.imports if module not in own]
        for modules in filter(None, (own, others)):
            if own and modules is others:
                yield ""
            for module in sorted(modules, key=lambda name: (bool(self.imports[name]), name)):
                names = ", ".join(sorted(self.imports[module]))
                yield f"from {module} import {names}" if names else f"import {module}"


_PREPARATION: ContextVar[Preparation | None] = ContextVar(
    "htp_export.as_python.preparation", default=None
)


def wanted_program() -> Preparation | None:
    """Return the lines before the call, for a command to complete; None if the command is to run."""
    return _PREPARATION.get()


def python_of(run: Callable[[], object]) -> str:
    """Run a command up to its call of a public function, and return this call as Python.

    A command that prepares the objects of its call writes these lines into `wanted_program`.

    Raises:
        InputError: If the command calls no public function, or an argument has no form in Python.
    """
    preparation = Preparation()

    def observe(
        function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        name = public_name(function)
        if name is not None and name not in _CALLED_BEFORE:
            raise CallSeen(_program(preparation, name, function, args, kwargs))

    token = _PREPARATION.set(preparation)
    try:
        with observed_calls(observe):
            run()
    except CallSeen as seen:
        return seen.text
    finally:
        _PREPARATION.reset(token)
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
    preparation: Preparation,
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    """The lines of a program that makes the call, and prints its result."""
    arguments = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    arguments |= preparation.arguments
    for parameter in preparation.left_out:
        arguments.pop(parameter, None)
    if arguments.get("session_options") is not None:
        _prepare_session(preparation, arguments)
    call = call_text(f"result = htp_export.{name}", function, arguments)
    return preparation.program(call, f"print({preparation.printed})")


def _prepare_session(preparation: Preparation, arguments: dict[str, Any]) -> None:
    """Write the lines for the options of a session that are not ONNX Runtime's defaults."""
    given = arguments.pop("session_options")
    default = type(given)()
    lines: list[str] = []
    for setting in dir(default):
        value = getattr(given, setting)
        if setting.startswith("_") or callable(value) or value == getattr(default, setting):
            continue
        is_plain = isinstance(value, bool | int | float | str)
        text = text_of(value) if is_plain else f"onnxruntime.{type(value).__name__}.{value.name}"
        lines.append(f"options.{setting} = {text}")
    if lines:
        preparation.imports["onnxruntime"] = []
        preparation.lines += ["options = onnxruntime.SessionOptions()", *lines]
        arguments["session_options"] = Written("options")


def call_text(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return a call as Python: its arguments without defaults.

    Args:
        name: The name of the function in the program, after ``variable =`` if there is one.
        function: The function, for its signature.
        arguments: Parameter → value; the options of ``**options`` are a mapping.

    Examples:
        >>> def cut(model: str, path: str, output: str | None = None, force: bool = False): ...
        >>> call_text("part = cut", cut, {"model": Path("net.onnx"), "path": "head", "force": True})
        'part = cut("net.onnx", "head", force=True)'
        >>> def draw(model: str, *outputs: str, size: int = 1): ...
        >>> call_text("draw", draw, {"model": "net.onnx", "outputs": ("a.html",), "size": 2})
        'draw("net.onnx", "a.html", size=2)'
    """
    given: list[tuple[str, Any]] = []  # the beginning of each argument, and its value
    is_positional = True
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            options = arguments.get(parameter.name, {})
            given += [(f"{key}=", value) for key, value in options.items()]
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            given += [("", value) for value in arguments.get(parameter.name, ())]
            continue
        value = arguments.get(parameter.name, parameter.default)
        if parameter.name not in arguments or _is_default(value, parameter):
            is_positional = False
            continue
        is_positional = is_positional and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        given.append(("" if is_positional else f"{parameter.name}=", value))
    texts = [beginning + text_of(value) for beginning, value in given]
    line = f"{name}({', '.join(texts)})"
    if len(line) <= _LONGEST_LINE:
        return line
    lines = [f"{name}("]
    for text, (beginning, value) in zip(texts, given, strict=True):
        is_long = len(f"    {text},") > _LONGEST_LINE
        lines.append(f"    {beginning + _on_lines(value) if is_long else text},")
    return "\n".join([*lines, ")"])


def _on_lines(value: Any) -> str:
    """A value as Python, with a line for each entry of a mapping or list."""
    if not isinstance(value, Mapping | list | tuple):
        return text_of(value)
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    lines = "".join(f"        {entry},\n" for entry in _entries(value))
    return f"{opening}\n{lines}    {closing}"


def _entries(value: Mapping[Any, Any] | Sequence[Any]) -> list[str]:
    """The entries of a mapping or list as Python."""
    if isinstance(value, Mapping):
        return [f"{text_of(key)}: {text_of(each)}" for key, each in value.items()]
    return list(map(text_of, value))


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a value is the default; the command line has empty mappings and lists in place of None."""
    if parameter.default is None and isinstance(value, Mapping | list | tuple) and not value:
        return True
    if isinstance(value, list) and isinstance(parameter.default, tuple):
        return tuple(value) == parameter.default
    return type(value) is type(parameter.default) and value == parameter.default


def text_of(value: Any) -> str:
    """A value as Python.

    Raises:
        InputError: If the value is an object that the command line made, such as a PyTorch model.
    """
    if isinstance(value, Written):
        return value.text
    if isinstance(value, PathLike):
        return _quoted(fspath(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(_entries(value))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_entries(value))}]"
    if type(value).__name__ == "TaggedModel":  # the class imports onnx
        return _quoted(fspath(getattr(value, "_file", None) or "model.onnx"))
    if isinstance(value, str):
        return _quoted(value)
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if is_torch_module(value):
        raise InputError("--as-python is for commands on files; for a model, see docs/export.md")
    raise InputError(f"--as-python: {type(value).__name__} has no short form in Python")


def _quoted(text: str) -> str:
    """A string as Python, in double quotes if it contains none."""
    plain = repr(text)
    return f'"{plain[1:-1]}"' if plain[0] == "'" and '"' not in text else plain
