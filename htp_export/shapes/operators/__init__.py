"""The rules of operators, a file for each family, which registers them; see https://onnx.ai/onnx/operators/.

A rule gives one shape for each output, or None where it cannot tell; a dimension that it cannot
tell is None. An operator without a rule is asked of ONNX's own inference, node by node; see
``schemas``. It needs a rule where that does not know the operator, or does not know what sizes are
computed of open ones.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import onnx_ir as ir

from htp_export.shapes.known import Contents, Dims, Known, Operation

Rule: TypeAlias = Callable[[Operation, Known], Sequence[Dims | None] | None]
"""What the shapes of a node's results are; None, as a whole or for one of them, where that is not known."""
ContentRule: TypeAlias = Callable[[Operation, Known], Contents | None]
"""What the first result holds."""
TypeRule: TypeAlias = Callable[[Operation, Known], ir.DataType | None]
"""What the element type of the first result is."""

_R = TypeVar("_R")


@dataclass
class Rules:
    """The rules of one operator; None where there is none."""

    shape: Rule | None = None
    contents: ContentRule | None = None
    type: TypeRule | None = None


_NONE = Rules()
_rules: defaultdict[tuple[str, str], Rules] = defaultdict(Rules)


def _registering(kind: str, ops: tuple[str, ...], domain: str) -> Callable[[_R], _R]:
    def register(rule: _R) -> _R:
        for op in ops:
            setattr(_rules[domain, op], kind, rule)
        return rule

    return register


def shape_rule(*ops: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register how the shapes of what operators give are found.

    Examples:
        >>> @shape_rule("Twice", domain="my.domain")
        ... def twice(node, known):
        ...     shape = known.shape(node.inputs[0])
        ...     return None if shape is None else [[*shape[:-1], 2 * shape[-1]]]
        >>> rules_of("my.domain", "Twice").shape is twice
        True
    """
    return _registering("shape", ops, domain)


def content_rule(*ops: str, domain: str = "") -> Callable[[ContentRule], ContentRule]:
    """Register what the first result of operators holds, where that are a few integers, sizes or booleans."""
    return _registering("contents", ops, domain)


def type_rule(*ops: str, domain: str = "") -> Callable[[TypeRule], TypeRule]:
    """Register the element type of what operators give first, where their schemas do not say it."""
    return _registering("type", ops, domain)


def rules_of(domain: str, op: str) -> Rules:
    """The rules of an operator."""
    _load()
    return _rules.get((domain, op), _NONE)


@functools.cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
