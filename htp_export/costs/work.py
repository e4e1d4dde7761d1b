"""Work of one node, by a formula for its operator; ``docs/cost.md`` lists the formulas.

FLOPs are two for each multiply-add, as torch's ``FlopCounterMode`` counts. All other operations are
counted separately.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from htp_export.costs.execution import RunStep, UnknownShapeError
from htp_export.discovery import names_in
from htp_export.errors import InputError
from htp_export.shapes.operator_kinds import CONTROL_FLOW

_FOLDER = "htp_export.costs.formulas"


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of a node.

    Attributes:
        macs: Multiply-adds of matrix products and convolutions, also inside attention and recurrent
            layers.
        other: All other arithmetic, comparisons and logic, in operations on one element; ``exp``,
            ``tanh`` and ``erf`` are one operation each.
    """

    macs: int = 0
    other: int = 0


NOTHING = Work()

_TOO_MUCH = 1 << 256
"""More operations than any real node has.

Attributes in a file may ask for a number that is too long to print.
"""

Formula: TypeAlias = Callable[[RunStep], Work]
"""Returns the work of one run of a node; raises ``UnknownShapeError`` for unknown shapes."""

Formulas: TypeAlias = Mapping[tuple[str, str], Formula]
"""``(domain, operator)`` → formula; ONNX's own domain is ``""``."""


def per_output(count: int) -> Formula:
    """The formula of a constant number of operations for each element of the output."""
    return lambda step: Work(0, count * math.prod(step.output_shape()))


def per_input(count: int) -> Formula:
    """The formula of a constant number of operations for each element of the first input."""
    return lambda step: Work(0, count * math.prod(step.shape(0)))


def nothing(_step: RunStep) -> Work:
    """No work: the operator moves, selects or converts elements."""
    return NOTHING


def names(text: str) -> list[str]:
    """The operators of a text, separated by spaces."""
    return text.split()


@cache
def _own_formulas() -> Formulas:
    formulas: Formulas = {}
    for name in names_in(_FOLDER):
        formulas = {**formulas, **importlib.import_module(f"{_FOLDER}.{name}").FORMULAS}
    return formulas


def all_formulas(further: Formulas | None = None) -> Formulas:
    """``(domain, operator)`` → formula, of ``costs/formulas`` and ``further`` ones.

    The domain of ONNX's own operators is ``""``; ``further`` may use ``ai.onnx``, too.

    Raises:
        InputError: A key or formula of ``further`` has the wrong type.
    """
    known = dict(_own_formulas())
    for key, formula in (further or {}).items():
        is_pair = isinstance(key, tuple) and len(key) == 2
        if not is_pair or not all(isinstance(part, str) for part in key):
            raise InputError(
                f"formulas: {key!r} is no pair of domain and operator, such as ('my.domain', 'Op')"
            )
        if not callable(formula):
            raise InputError(f"formulas: the formula of {key!r} is not a function, but {formula!r}")
        domain, op_type = key
        known["" if domain == "ai.onnx" else domain, op_type] = formula
    return known


def work_of(step: RunStep, formulas: Formulas | None = None) -> Work | None:
    """The work of one run of a node, without its subgraphs; None if it is unknown.

    It is unknown if its operator has no formula, or the formula needs an unknown shape.
    ``formulas`` is a result of `all_formulas`; the default contains the package's formulas.

    Raises:
        InputError: A formula does not return `Work`.
    """
    if step.op[0] == "" and step.op[1] in CONTROL_FLOW:
        return NOTHING if step.trips_known else None
    formula = (_own_formulas() if formulas is None else formulas).get(step.op)
    if formula is None:
        return None
    try:
        work = formula(step)
    except (UnknownShapeError, IndexError, ValueError, ZeroDivisionError, OverflowError):
        # All but the first error: the node is not valid.
        return None
    if not isinstance(work, Work):
        raise InputError(
            f"formulas: the formula of {step.op!r} returned {work!r}; return htp_export.Work(macs=..., other=...)"
        )
    if max(abs(work.macs), abs(work.other)) >= _TOO_MUCH:
        return None
    return work
