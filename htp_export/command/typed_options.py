"""Messages of functions, for the command line: parameters of Python as the options that the user types.

Functions serve Python and the command line. Their messages name parameters, ``measured=(...)``;
an error of a command names the option, ``--measured``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_OTHER_NAMES = {
    "providers": "provider",
    "session_options": "optimization",
    "attn_implementation": "attention",
    "opset_version": "opset",
    "output_names": "name",
    "overrides": "settings",
}
"""Parameter of a function → the parameter of a command, where the names differ."""

_HINT = re.compile(r" \((?:in Python: [^()]*|\w+=(?:True|False))\)")
"""A parameter beside its option: ``--random-weights (random_weights=True)``."""

_ARGUMENT = re.compile(
    r"(?<![\w:.-])(\w+)=(\(\.\.\.\)|\[\.\.\.\]|\{[^{}]*\}|True|False|'[^']*'|\"[^\"]*\")"
)
"""An argument as Python has it: ``engine='onnxruntime'``, ``measured=(...)``, ``strict=False``."""

_SUBJECT = re.compile(r"(\w+)(?=,| is | are |(?: of)? ['\"]?(\S+?)['\"]?[ :;,])")
"""The first word of a message, and the value after it: ``level 'foo' is none of exact, tolerant``."""


def as_typed(message: str, parameters: Iterable[Any], given: Mapping[str, Any]) -> str:
    """Return a message with options of a command in place of parameters of Python.

    Args:
        message: The message of an error.
        parameters: The parameters of the command.
        given: Parameter → its value.
    """
    options = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.param_type_name == "option"
    }
    for other, name in _OTHER_NAMES.items():
        if name in options:
            options.setdefault(other, options[name])

    def typed(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in options:
            return match[0]
        on = _long_name(options[name].opts)
        if value == "False":
            return next(iter(options[name].secondary_opts), f"no {on}")
        if value == "True" or value[0] in "([{":
            return on
        return f"{on} {value[1:-1]}"

    message = _ARGUMENT.sub(typed, _HINT.sub("", message))
    subject = _SUBJECT.match(message)
    if subject is None or subject[1] not in options:
        return message
    option = options[subject[1]]
    typed_value = given.get(option.name)
    if not typed_value or (subject[2] is not None and subject[2] not in str(typed_value)):
        return message
    return f"{_long_name(option.opts)}{message[len(subject[1]) :]}"


def _long_name(names: Iterable[str]) -> str:
    """The name of an option with two dashes, if it has one."""
    names = list(names)
    return next((name for name in names if name.startswith("--")), names[0])
