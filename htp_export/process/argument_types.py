"""Arguments: the types of plain data and of a public function's parameters, and the range of whole numbers."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ParamSpec, TypeGuard, TypeVar

from htp_export.errors import InputError

if TYPE_CHECKING:
    from torch import nn


_P = ParamSpec("_P")
_R = TypeVar("_R")

_LONGEST = 60  # characters of a value in a message


def parameter_type(function: Callable[..., Any], name: str) -> Any:
    """Return the type of a parameter, as text if it cannot be evaluated; None for one in ``**options`` of a tool."""
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is None or parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return None
    try:
        # text of our own source
        return eval(parameter.annotation, vars(inspect.getmodule(function)))
    except NameError:  # imported for type checkers alone
        return parameter.annotation


def check_type(name: str, value: Any, kind: Any) -> None:
    """Refuse plain data that do not have the type of a parameter, as `parameter_type` has it.

    Examples:
        >>> check_type("rank", "two", int)
        Traceback (most recent call last):
        ...
        htp_export.errors.InputError: rank is 'two', and takes int
    """
    if not _fits(value, kind):
        raise InputError(f"{name} is {value!r}, and takes {_said(kind)}")


def _said(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    return (
        kind.__name__
        if isinstance(kind, type)
        else re.sub(r"\b(typing|collections\.abc)\.", "", str(kind))
    )


def _fits(value: Any, kind: Any) -> bool:
    """Whether plain data have the type of a parameter; objects of Python, and types that are not plain, always do."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if (
        not isinstance(value, str | bool | int | float | list | tuple | dict)
        or kind is None
        or isinstance(kind, str)
    ):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(each is not type(None) and _fits(value, each) for each in inner)
    if origin is typing.Literal:
        return value in inner
    if kind in (bool, int, float, str):
        numbers = (int, float) if kind is float else kind
        return isinstance(value, numbers) and (kind is bool or not isinstance(value, bool))
    if origin is collections.abc.Mapping:
        entries = value.items() if isinstance(value, dict) else ()
        return isinstance(value, dict) and all(
            _fits(key, inner[0]) and _fits(each, inner[1]) for key, each in entries
        )
    if origin is tuple:
        return (
            isinstance(value, list | tuple)
            and len(value) == len(inner)
            and all(map(_fits, value, inner))
        )
    if origin in (collections.abc.Sequence, collections.abc.Iterable):
        return isinstance(value, list | tuple) and all(_fits(each, inner[0]) for each in value)
    return True


# --- public functions -----------------------------------------------------------------------------------


def checks_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function raise a TypeError that says what fits, where an argument has another type than its parameter.

    Models, modules, files, mappings and lists are checked; numbers and words have errors of their
    own.

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
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's own error names the function
        wrong = [
            name
            for name, value in given.items()
            if not _suits(value, signature.parameters[name], function)
        ]
        if wrong:
            raise TypeError(_problem(function, signature, given, wrong))
        return function(*args, **kwargs)

    return checked


def check_fits(function: Callable[..., Any], name: str, value: Any) -> None:
    """Refuse an argument that `checks_arguments` cannot see: one among ``*positional``, for a parameter with a name."""
    signature = inspect.signature(function)
    if not _suits(value, signature.parameters[name], function):
        raise TypeError(_problem(function, signature, {name: value}, [name]))


def _problem(
    function: Callable[..., Any],
    signature: inspect.Signature,
    given: Mapping[str, Any],
    wrong: Sequence[str],
) -> str:
    """What is to be said of the arguments that do not fit: of the first one, or that two of them are swapped."""
    name, *others = wrong
    takes = " or ".join(
        words for _, words in _checks(signature.parameters[name], function) if words
    )
    value = repr(given[name])
    short = (
        value
        if len(value) <= _LONGEST and "\n" not in value and "<" not in value
        else "what was given"
    )
    text = f"{function.__name__}: {name} takes {takes}, and {short} is of type {type(given[name]).__name__}"
    for other in others:
        if _suits(given[name], signature.parameters[other], function) and _suits(
            given[other], signature.parameters[name], function
        ):
            return f"{text}: {name} and {other} are swapped; the order is {function.__name__}({name}, {other})"
    return text


def _suits(value: Any, parameter: inspect.Parameter, function: Callable[..., Any]) -> bool:
    if (
        parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        or value is parameter.default
    ):
        return True
    checks = _checks(parameter, function)
    return not checks or any(fits(value) for fits, _ in checks)


_Check = tuple[Callable[[Any], bool], str]
"""Whether a value fits, and what does, in words."""


@functools.cache
def _checks(parameter: inspect.Parameter, function: Callable[..., Any]) -> list[_Check]:
    """What may be given for a parameter; empty where everything may, or where it is a number."""
    checks: list[_Check] = []
    names = inspect.unwrap(function).__globals__
    for text in _members(parameter.annotation, names):
        known = _KNOWN.get(text) or _KNOWN.get(text.partition("[")[0].rpartition(".")[2])
        if known is None and isinstance(kind := names.get(text), type) and kind is not Any:
            known = _has_type(kind), f"a {text}"
        if known is None:
            return []
        fits, words = known
        checks.append(
            (_texts, "a list of strings") if text.endswith("Sequence[str]") else (fits, words)
        )
    return [] if {words for _, words in checks} <= {"", "a whole number"} else checks


def _members(annotation: Any, names: Mapping[str, Any]) -> Iterator[str]:
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
    """Whether it is a module of PyTorch, which is not imported for this."""
    return any(
        f"{each.__module__}.{each.__name__}" == "torch.nn.modules.module.Module"
        for each in type(value).__mro__
    )


def _is_onnx(value: Any) -> bool:
    if isinstance(value, str | os.PathLike):
        return True
    return not is_torch_module(value) and (hasattr(value, "graph") or hasattr(value, "model"))


def _texts(value: Any) -> bool:
    return _is_list(value) and (
        isinstance(value, Iterator) or all(isinstance(each, str) for each in value)
    )


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
        "what htp_export.export returned",
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
    "int": (lambda value: hasattr(value, "__index__"), "a whole number"),
}
"""Name of a type, as it is written in a signature → how it is checked."""


MOST_SEED = 2**32 - 1
"""What all random generators take: torch's, numpy's and those of the samplers of Optuna."""

MOST_RUNS = 1_000_000
"""Of timed runs, and of trials: more take days for the smallest model, and their times are kept in memory."""

_THREADS_OF_A_CORE = 16  # beyond what any scheduler gains from


def most_threads() -> int:
    """The number of threads beyond which they only wait for each other, and a session takes minutes to start."""
    return _THREADS_OF_A_CORE * (os.cpu_count() or 1)


def check_seed(seed: int) -> None:
    """Refuse what is no seed."""
    check_whole("seed", seed, 0, MOST_SEED)


def check_whole(name: str, value: int, least: int, most: int) -> int:
    """Refuse a number that is not whole, or out of its range.

    Examples:
        >>> check_whole("seed", -1, 0, 9)
        Traceback (most recent call last):
        ...
        htp_export.errors.InputError: seed -1: it is a whole number from 0 to 9
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= value <= most:
        raise InputError(f"{name} {value!r}: it is a whole number from {least} to {most}")
    return int(value)
