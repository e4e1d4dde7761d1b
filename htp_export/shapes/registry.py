"""The rules of operators: each file in ``operators`` registers those of one family.

An operator without a rule is asked of ONNX's own inference, node by node; see ``schemas``. It needs a rule where that
does not know the operator, or does not know what sizes are computed of open ones.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import onnx_ir as ir

from htp_export.shapes.known import Contents, Dims, Known, Operation

Rule: TypeAlias = Callable[[Operation, Known], Sequence[Dims | None] | None]
"""What the shapes of a node's results are; None, as a whole or for one of them, where that is not known."""
ContentRule: TypeAlias = Callable[[Operation, Known], Contents | None]
"""What the first result holds."""
TypeRule: TypeAlias = Callable[[Operation, Known], ir.DataType | None]
"""What the element type of the first result is."""

Key = tuple[str, str]

_R = TypeVar("_R")

_shape_rules: dict[Key, Rule] = {}
_content_rules: dict[Key, ContentRule] = {}
_type_rules: dict[Key, TypeRule] = {}


class Rules(NamedTuple):
    """The rules of one operator; None where there is none."""

    shape: Rule | None
    contents: ContentRule | None
    type: TypeRule | None


def _registering(table: dict[Key, _R], ops: tuple[str, ...], domain: str) -> Callable[[_R], _R]:
    def register(rule: _R) -> _R:
        table.update({(domain, op): rule for op in ops})
        rules_of.cache_clear()
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
    return _registering(_shape_rules, ops, domain)


def content_rule(*ops: str, domain: str = "") -> Callable[[ContentRule], ContentRule]:
    """Register what the first result of operators holds, where that are a few integers, sizes or booleans."""
    return _registering(_content_rules, ops, domain)


def type_rule(*ops: str, domain: str = "") -> Callable[[TypeRule], TypeRule]:
    """Register the element type of what operators give first, where their schemas do not say it."""
    return _registering(_type_rules, ops, domain)


@functools.cache
def rules_of(domain: str, op: str) -> Rules:
    """The rules of an operator."""
    _load()
    key = domain, op
    return Rules(_shape_rules.get(key), _content_rules.get(key), _type_rules.get(key))


@functools.cache
def _load() -> None:
    from htp_export.shapes import operators

    for module in pkgutil.iter_modules(operators.__path__, f"{operators.__name__}."):
        importlib.import_module(module.name)
