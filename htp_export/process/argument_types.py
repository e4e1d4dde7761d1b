"""Checks of arguments: the types of plain data, the types of a public function's parameters, ranges of integers."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeGuard, TypeVar

from htp_export.errors import InputError

if TYPE_CHECKING:
    from torch import nn


_P = ParamSpec("_P")
_R = TypeVar("_R")

_LONGEST = 60  # characters of a value in a message


def parameter_type(function: Callable[..., Any], name: str) -> Any:
    """Return the type of a parameter, as text if it cannot be evaluated; None for a parameter in ``**options``."""
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is None or parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return None
    try:
        # an annotation in the source of htp_export, which is trusted
        return eval(parameter.annotation, vars(inspect.getmodule(function)))
    except NameError:  # imported for type checkers alone
        return parameter.annotation


def check_type(name: str, value: Any, kind: Any) -> None:
    """Refuse plain data that does not have the type of a parameter, as returned by `parameter_type`.

    Examples:
        >>> check_type("rank", "two", int)
        Traceback (most recent call last):
        ...
        htp_export.errors.InputError: rank is 'two', and takes int
    """
    if not _fits(value, kind):
        raise InputError(f"{name} is {value!r}, and takes {_type_text(kind)}")


def _type_text(kind: Any) -> str:
    """Return the name of a type for a message."""
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    if isinstance(kind, type):
        return kind.__name__
    return re.sub(r"\b(typing|collections\.abc)\.", "", str(kind))


_PLAIN = (str, bool, int, float, list, tuple, dict)


# One case for each kind of type, without nesting.
def _fits(value: Any, kind: Any) -> bool:
    """Return whether plain data has the type of a parameter; True for other objects and other types."""
    if not isinstance(value, _PLAIN) or kind is None or isinstance(kind, str):
        return True
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(member is not type(None) and _fits(value, member) for member in inner)
    if origin is typing.Literal:
        return value in inner
    if kind in (bool, int, float, str):
        return _fits_scalar(value, kind)
    if origin is collections.abc.Mapping:
        return isinstance(value, dict) and _fits_items(value, inner)
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(inner):
            return False
        return all(map(_fits, value, inner))
    if origin in (collections.abc.Sequence, collections.abc.Iterable):
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    return True


def _fits_scalar(value: Any, kind: type) -> bool:
    if isinstance(value, bool):  # a bool is an int in Python
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _fits_items(value: dict[Any, Any], inner: tuple[Any, ...]) -> bool:
    key_kind, item_kind = inner
    return all(_fits(key, key_kind) and _fits(item, item_kind) for key, item in value.items())


# --- public functions -----------------------------------------------------------------------------------


Observer: TypeAlias = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], None]
"""Called with a public function and its arguments, before the function runs."""

_OBSERVER: ContextVar[Observer | None] = ContextVar("htp_export.observed_calls", default=None)


@contextlib.contextmanager
def observed_calls(observer: Observer) -> Iterator[None]:
    """In a ``with`` block, call ``observer`` before each public function that has `checks_arguments`."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def checks_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function raise a TypeError for an argument of another type than its parameter.

    Models, modules, files, mappings and lists are checked; functions check numbers and words
    themselves.

    Examples:
        >>> @checks_arguments
        ... def prune(model: ModelSource, plan: Mapping[str, Any]):
        ...     pass
        >>> prune("net.onnx", 0.5)
        Traceback (most recent call last):
        ...
        TypeError: prune: plan takes a mapping, and 0.5 is of type float
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if (observer := _OBSERVER.get()) is not None:
            observer(function, args, kwargs)
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's own error names the function
        parameters = signature.parameters
        wrong = [
            name
            for name, value in arguments.items()
            if not _suits(value, parameters[name], function)
        ]
        if wrong:
            raise TypeError(_problem(function, signature, arguments, wrong))
        return function(*args, **kwargs)

    return checked


def check_fits(function: Callable[..., Any], name: str, value: Any) -> None:
    """Refuse an argument that `checks_arguments` cannot check: one in ``*args``, for a named parameter."""
    signature = inspect.signature(function)
    if not _suits(value, signature.parameters[name], function):
        raise TypeError(_problem(function, signature, {name: value}, [name]))


def _problem(
    function: Callable[..., Any],
    signature: inspect.Signature,
    arguments: Mapping[str, Any],
    wrong: Sequence[str],
) -> str:
    """Return the message for arguments of wrong types: about the first one, or that two of them are swapped."""
    name, *others = wrong
    parameter = signature.parameters[name]
    accepted = " or ".join(words for _, words in _checks(parameter, function) if words)
    shown = repr(arguments[name])
    if len(shown) > _LONGEST or "\n" in shown or "<" in shown:
        shown = "the argument"
    text = f"{function.__name__}: {name} takes {accepted}, and {shown} is of type {type(arguments[name]).__name__}"
    for other in others:
        suits_other = _suits(arguments[name], signature.parameters[other], function)
        if suits_other and _suits(arguments[other], parameter, function):
            return f"{text}: {name} and {other} are swapped; the order is {function.__name__}({name}, {other})"
    return text


def _suits(value: Any, parameter: inspect.Parameter, function: Callable[..., Any]) -> bool:
    """Return whether an argument has the type of its parameter."""
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return True
    if value is parameter.default:
        return True
    checks = _checks(parameter, function)
    return not checks or any(fits(value) for fits, _ in checks)


_Check = tuple[Callable[[Any], bool], str]
"""A predicate for values, and a description of the values that it accepts."""


@functools.cache
def _checks(parameter: inspect.Parameter, function: Callable[..., Any]) -> list[_Check]:
    """Return the checks of a parameter, of which one must pass; empty if any value, or only a number, is accepted."""
    checks: list[_Check] = []
    names = inspect.unwrap(function).__globals__
    for text in _members(parameter.annotation, names):
        check = _KNOWN.get(text) or _KNOWN.get(text.partition("[")[0].rpartition(".")[2])
        kind = names.get(text)
        if check is None and isinstance(kind, type) and kind is not Any:
            check = _has_type(kind), f"a {text}"
        if check is None:
            return []
        if text.endswith("Sequence[str]"):
            check = _texts, "a list of strings"
        checks.append(check)
    descriptions = {description for _, description in checks}
    return [] if descriptions <= {"", "a whole number"} else checks


def _members(annotation: Any, names: Mapping[str, Any]) -> Iterator[str]:
    """Iterate over the names of the types in an annotation, also of the members of unions and aliases."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member, names)
        return
    if not isinstance(annotation, str):
        yield annotation.__name__ if type(annotation) is type else str(annotation)
        return
    for text in re.split(r" \| (?![^\[]*\])", annotation):
        alias = names.get(text)
        if text not in _KNOWN and typing.get_origin(alias) is not None:
            yield from _members(alias, names)
        else:
            yield text


def is_torch_module(value: object) -> TypeGuard[nn.Module]:
    """Return whether a value is a PyTorch module, without importing PyTorch."""
    return any(
        f"{base.__module__}.{base.__name__}" == "torch.nn.modules.module.Module"
        for base in type(value).__mro__
    )


def _is_onnx(value: Any) -> bool:
    if isinstance(value, str | os.PathLike):
        return True
    return not is_torch_module(value) and (hasattr(value, "graph") or hasattr(value, "model"))


def _texts(value: Any) -> bool:
    """Return whether a value is a list of strings; the items of an iterator are not checked."""
    if not _is_list(value):
        return False
    return isinstance(value, Iterator) or all(isinstance(item, str) for item in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | Set | collections.abc.MappingView | Iterator)


def _has_type(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


_KNOWN: dict[str, _Check] = {
    "ModelSource": (
        _is_onnx,
        "an ONNX model: a file, a TaggedModel, an ONNXProgram, a ModelProto or an ir.Model",
    ),
    "Module": (is_torch_module, "a PyTorch module"),
    "ONNXProgram": (
        lambda value: type(value).__name__ == "ONNXProgram",
        "the result of htp_export.export",
    ),
    "None": (lambda value: value is None, ""),
    "NoneType": (lambda value: value is None, ""),
    "str": (_has_type(str), "a string"),
    "PathLike": (_has_type(os.PathLike), "a path"),
    "Mapping": (_has_type(Mapping), "a mapping"),
    "dict": (_has_type(Mapping), "a mapping"),
    "Sequence": (_is_list, "a list or a tuple"),
    "tuple": (_has_type(tuple, list), "a tuple"),
    "Iterable": (_has_type(collections.abc.Iterable), "a list"),
    "Callable": (callable, "a function"),
    "int": (lambda value: hasattr(value, "__index__"), "a whole number"),
}
"""Name of a type in a signature → its check."""


MOST_SEED = 2**32 - 1
"""The largest seed of all random generators: those of torch, numpy and the samplers of Optuna."""

MOST_RUNS = 1_000_000
"""Timed runs or trials: more take days for the smallest model, and their times are kept in memory."""

_THREADS_OF_A_CORE = 16  # more threads do not make any scheduler faster


def most_threads() -> int:
    """Return the largest number of threads: more of them only wait, and a session takes minutes to start."""
    return _THREADS_OF_A_CORE * (os.cpu_count() or 1)


def check_seed(seed: int) -> None:
    """Refuse an invalid seed of random generators."""
    check_whole("seed", seed, 0, MOST_SEED)


def check_whole(name: str, value: int, least: int, most: int) -> int:
    """Refuse a value that is not an integer in a range; return it as an ``int``.

    Examples:
        >>> check_whole("seed", -1, 0, 9)
        Traceback (most recent call last):
        ...
        htp_export.errors.InputError: seed -1: it is a whole number from 0 to 9
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= value <= most:
        raise InputError(f"{name} {value!r}: it is a whole number from {least} to {most}")
    return int(value)
