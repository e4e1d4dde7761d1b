"""Floating-point operations of a node, by a formula for its operator; ``docs/cost.md`` lists them.

``FLOPs`` are two for each multiply-add of a matrix product or convolution, wherever that stands: what torch's
``FlopCounterMode`` counts, and papers print. Everything else is counted apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from htp_export.costs import attention_work, elementwise, products, selection_work
from htp_export.costs.execution import Step, UnknownShapeError
from htp_export.costs.work import NOTHING, Formula, Work
from htp_export.model.operators import CONTROL_FLOW

__all__ = ["counted_operators", "work_of"]

_FORMULAS: Mapping[tuple[str, str], Formula] = {
    **elementwise.FORMULAS,
    **products.FORMULAS,
    **attention_work.FORMULAS,
    **selection_work.FORMULAS,
}


def counted_operators() -> dict[str, list[str]]:
    """Domain → the operators that have a formula."""
    found: dict[str, list[str]] = {}
    for domain, op_type in sorted(_FORMULAS):
        found.setdefault(domain, []).append(op_type)
    return found


def work_of(step: Step) -> Work | None:
    """What one run of a node computes; what its subgraphs compute is not in it.

    Args:
        step: The node, with the shapes of what it reads and makes.

    Returns:
        Its work; None where there is no formula for its operator, or a shape is not known that the formula needs.

    Examples:
        >>> import onnx_ir as ir
        >>> from htp_export.costs.execution import Tensor
        >>> a, b, c = (Tensor("", ir.DataType.FLOAT, shape) for shape in ((2, 3), (3, 5), (2, 5)))
        >>> work_of(Step(ir.node("MatMul", [ir.val("a"), ir.val("b")]), (), (a, b), (c,)))
        Work(macs=30, other=0)
    """
    if step.op[0] == "" and step.op[1] in CONTROL_FLOW:
        return NOTHING if step.trips_known else None
    formula = _FORMULAS.get(step.op)
    if formula is None:
        return None
    try:
        return formula(step)
    except (UnknownShapeError, IndexError, ValueError, ZeroDivisionError, OverflowError):  # the last: no valid node
        return None
