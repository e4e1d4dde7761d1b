"""Types of arguments that are typed, or read from a file: plain data, for the parameters of a function."""

from __future__ import annotations

import collections.abc
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

from htp_export.errors import InputError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_type", "is_module", "parameter_type"]


def parameter_type(function: Callable[..., Any], name: str) -> Any:
    """Return the type of a parameter, as text if it cannot be evaluated; None for one in ``**options`` of a tool."""
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is None or parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return None
    try:
        return eval(parameter.annotation, vars(inspect.getmodule(function)))  # text of our own source
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
    """A type in words."""
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    return kind.__name__ if isinstance(kind, type) else re.sub(r"\b(typing|collections\.abc)\.", "", str(kind))


def _fits(value: Any, kind: Any) -> bool:
    """Whether plain data have the type of a parameter; objects of Python, and types that are not plain, always do."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if not isinstance(value, str | bool | int | float | list | tuple | dict) or kind is None or isinstance(kind, str):
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
        return isinstance(value, dict) and all(_fits(key, inner[0]) and _fits(each, inner[1]) for key, each in entries)
    if origin is tuple:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin in (collections.abc.Sequence, collections.abc.Iterable):
        return isinstance(value, list | tuple) and all(_fits(each, inner[0]) for each in value)
    return True


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Whether a value is an ``nn.Module``; torch is not imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)
