"""Shape rules of operators, one file for each family; see https://onnx.ai/onnx/operators/.

A rule returns one shape for each output, None for an unknown shape, and shapes with None for
unknown dimensions. Operators without a rule are inferred by ONNX itself, node by node; see
``schemas``. A rule is needed if ONNX does not know the operator, or cannot compute sizes from open
dimensions.
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
"""The shapes of a node's outputs; None for all of them, or for one, if unknown."""
ContentRule: TypeAlias = Callable[[Operation, Known], Contents | None]
"""The contents of the first output."""
TypeRule: TypeAlias = Callable[[Operation, Known], ir.DataType | None]
"""The element type of the first output."""

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
    """Register the shape rule of operators.

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
    """Register the rule for the contents of the first output: a few integers, sizes or booleans."""
    return _registering("contents", ops, domain)


def type_rule(*ops: str, domain: str = "") -> Callable[[TypeRule], TypeRule]:
    """Register the rule for the type of the first output, if the schema does not determine it."""
    return _registering("type", ops, domain)


def rules_of(domain: str, op: str) -> Rules:
    """The rules of an operator."""
    _load()
    return _rules.get((domain, op), _NONE)


@functools.cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
