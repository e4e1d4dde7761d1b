"""Floating-point operations of a node, by a formula for its operator; ``docs/cost.md`` lists them.

``FLOPs`` are two for each multiply-add of a matrix product or convolution, wherever that stands: what torch's
``FlopCounterMode`` counts, and papers print. Everything else is counted apart.
"""

from __future__ import annotations

import importlib
from functools import cache

from htp_export.capabilities.cost.execution import RunStep, UnknownShapeError
from htp_export.capabilities.cost.work import NOTHING, Formulas, Work
from htp_export.discovery import names_in
from htp_export.errors import InputError
from htp_export.shapes.operator_kinds import CONTROL_FLOW

__all__ = ["all_formulas", "work_of"]

_FOLDER = "htp_export.capabilities.cost.formulas"


@cache
def _own_formulas() -> Formulas:
    formulas: Formulas = {}
    for name in names_in(_FOLDER):
        formulas = {**formulas, **importlib.import_module(f"{_FOLDER}.{name}").FORMULAS}
    return formulas


def all_formulas(further: Formulas | None = None) -> Formulas:
    """``(domain, operator)`` → formula, of every file of ``costs/formulas``.

    Args:
        further: Formulas that go before those, of the domain ``""`` or ``ai.onnx`` for ONNX's own operators.

    Raises:
        InputError: If a key is no pair of words, or a formula cannot be called.
    """
    known = dict(_own_formulas())
    for key, formula in (further or {}).items():
        if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key)):
            raise InputError(f"formulas: {key!r} is no pair of domain and operator, such as ('my.domain', 'Op')")
        if not callable(formula):
            raise InputError(f"formulas: that of {key!r} is no function, but {formula!r}")
        domain, op_type = key
        known["" if domain == "ai.onnx" else domain, op_type] = formula
    return known


def work_of(step: RunStep, formulas: Formulas | None = None) -> Work | None:
    """What one run of a node computes; what its subgraphs compute is not in it.

    Args:
        step: The node, with the shapes of what it reads and makes.
        formulas: What `all_formulas` gives; those of the package without it.

    Returns:
        Its work; None where there is no formula for its operator, or a shape is not known that the formula needs.

    Raises:
        InputError: If a formula gives something else than `Work`.

    Examples:
        >>> import onnx_ir as ir
        >>> from htp_export.capabilities.cost.execution import Tensor
        >>> a, b, c = (Tensor("", ir.DataType.FLOAT, shape) for shape in ((2, 3), (3, 5), (2, 5)))
        >>> work_of(RunStep(ir.node("MatMul", [ir.val("a"), ir.val("b")]), (), (a, b), (c,)))
        Work(macs=30, other=0)
    """
    if step.op[0] == "" and step.op[1] in CONTROL_FLOW:
        return NOTHING if step.trips_known else None
    formula = (_own_formulas() if formulas is None else formulas).get(step.op)
    if formula is None:
        return None
    try:
        work = formula(step)
    except (UnknownShapeError, IndexError, ValueError, ZeroDivisionError, OverflowError):  # the last: no valid node
        return None
    if not isinstance(work, Work):
        raise InputError(f"formulas: that of {step.op!r} gives {work!r}; give htp_export.Work(macs=..., other=...)")
    return work
