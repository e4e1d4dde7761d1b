"""The rules of operators: each file in ``operators`` registers those of one family.

An operator without a rule is asked of ONNX's own inference, node by node; see ``schemas``. It needs a rule where that
does not know the operator, or does not know what sizes are computed of open ones.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from htp_export.shapes.known import ContentRule, Rule, TypeRule

__all__ = ["Rules", "content_rule", "rules_of", "shape_rule", "type_rule"]

Key = tuple[str, str]

_R = TypeVar("_R")

_shape_rules: dict[Key, Rule] = {}
_content_rules: dict[Key, ContentRule] = {}
_type_rules: dict[Key, TypeRule] = {}


class Rules(NamedTuple):
    """The rules of one operator.

    Attributes:
        shape: How the shapes of what it gives are found.
        contents: What the first result holds.
        type: The element type of the first result.
    """

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

    Args:
        ops: The operators.
        domain: Their domain.

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
    """The rules of an operator, each None where there is none."""
    _load()
    key = domain, op
    return Rules(_shape_rules.get(key), _content_rules.get(key), _type_rules.get(key))


@functools.cache
def _load() -> None:
    from htp_export.shapes import operators

    for module in pkgutil.iter_modules(operators.__path__, f"{operators.__name__}."):
        importlib.import_module(module.name)
